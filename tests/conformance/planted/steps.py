"""The honest forward, step by step; each step is a function that a planted backend may replace."""

from __future__ import annotations

from itertools import pairwise

import torch


def attend(q, k, v, out, *, meta, causal, scale, window, softcap, need_lse, options, **replaced):
    """A slot: see `polyattn.vendor`. `replaced` holds the steps that a planted backend does its own way."""
    step = {name: replaced.get(name, function) for name, function in STEPS.items()}
    answer, lse = step["rows"](q, k, v, meta, causal, scale, window, softcap, step)
    return step["deliver"](answer, out), step["lse_of"](lse) if need_lse else None


def rows(q, k, v, meta, causal, scale, window, softcap, step):
    """[B,S,H,D] at once, packed [T,H,D] by documents."""
    if q.dim() == 4:
        visible, bias = step["visible"](q, k, meta, causal, window, step)
        return step["softmax"](q, k, v, visible, bias, scale, softcap, step)
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    for (start, end), (k_start, k_end) in step["documents"](q, k, meta):
        part = q[None, start:end], k[None, k_start:k_end], v[None, k_start:k_end]
        visible = step["positions"](end - start, k_end - k_start, causal, window)
        answer, its_lse = step["softmax"](*part, visible, None, scale, softcap, step)
        out[start:end], lse[:, start:end] = answer[0], its_lse[0]
    return out, lse


def documents(q, k, meta):
    bounds_q, bounds_k = meta.cu_q.tolist(), meta.cu_k.tolist()
    return list(zip(pairwise(bounds_q), pairwise(bounds_k), strict=True))


def visible(q, k, meta, causal, window, step):
    """(bool [.., Sq, Sk], additive mask or None)"""
    seen = step["positions"](q.shape[1], k.shape[1], causal, window)
    if meta is None:
        return seen, None
    if hasattr(meta, "queries"):  # key padding
        seen = seen & meta.keep[:, None, None, :]
        return (seen & meta.keep[:, None, :, None] if meta.queries == "same" else seen), None
    if meta.keep is not None:
        return seen & meta.keep, None
    return seen & ~meta.bias.isneginf(), meta.bias.masked_fill(meta.bias.isneginf(), 0.0)


def positions(queries, keys, causal, window):
    row, column = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = column <= row if causal else torch.ones(queries, keys, dtype=torch.bool)
    left, right = window or (None, None)
    seen = seen if left is None else seen & (column >= row - left)
    return seen if right is None else seen & (column <= row + right)


def softmax(q, k, v, seen, bias, scale, softcap, step):
    group = q.shape[2] // k.shape[2]
    seen = seen.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    unseen = ~seen.any(dim=2).unflatten(1, (-1, group)).any(dim=2).transpose(1, 2)[..., None]
    k, v = step["without_garbage"](k, unseen), step["without_garbage"](v, unseen)
    empty = ~seen.any(-1)
    q = q.masked_fill(empty.transpose(1, 2)[..., None], 0.0)
    k, v = step["repeated"](k, group), step["repeated"](v, group)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = step["unless_empty"](scores, empty).logsumexp(-1)
    out = torch.einsum("bhij,bjhd->bihd", (scores - lse[..., None]).exp(), v)
    return out, lse.masked_fill(empty, float("-inf"))


def without_garbage(tensor, unseen):
    return tensor.masked_fill(unseen, 0.0)


def repeated(tensor, group):
    return tensor.repeat_interleave(group, dim=2)


def unless_empty(scores, empty):
    return scores.masked_fill(empty[..., None], 0.0)


def lse_of(lse):
    return lse


def deliver(answer, out):
    return answer if out is None else out.copy_(answer)


STEPS = {
    name: globals()[name]
    for name in (
        "rows", "documents", "visible", "positions", "softmax", "without_garbage", "repeated", "unless_empty", "lse_of",
        "deliver",
    )
}  # fmt: skip
