"""torch_musa's `aten::_flash_attention_forward` and its gradient, over muDNN, on CPU tensors; torch 2.7's arguments.

Packed documents, or a batch that, unlike CUDA's, has heads before rows. The LSE of documents is [B,H,max_q]. No source
says what muDNN does with rows that see nothing, nor to which corner it aligns causal where lengths differ: the first
are NaN here, the second is lint.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import torch

from tests.emulators.cuda.numerics import attend, band, gradients
from tests.emulators.musa.stack import VERSIONS as RELEASES
from tests.emulators.musa.stack import current, lint, require

VERSIONS = {"torch_musa": RELEASES["torch_musa"]}
#: "dense", "varlen", "backward" -> calls.
counts: Counter[str] = Counter()
_library: list[torch.library.Library] = []
Tensor = torch.Tensor
NAN = float("nan")


def install() -> None:
    """Registers the ops for the CPU, in this process for good."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", forward, "CPU")
    library.impl("_flash_attention_backward", backward, "CPU")
    _library.append(library)


def forward(
    query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int,
    max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *, scale: float | None = None,
    window_size_left: int | None = None, window_size_right: int | None = None, seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None, **later: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    """q [T,H,D] with boundaries, else [B,H,S,D] -> out, lse, and three that are empty."""
    name = "_flash_attention_forward doesn't support"
    require(alibi_slopes is None, f"{name} alibi_slopes for MUSA backend")
    require(window_size_left is None, f"{name} window_size_left for MUSA backend")
    require(window_size_right is None, f"{name} window_size_right for MUSA backend")
    require((cum_seq_q is None) == (cum_seq_k is None), "cumulative_sequence_length_q and _k must be both set or not")
    require(all(value is None for value in later.values()), f"torch 2.7 has no {', '.join(later)}")
    lint(seqused_k is None, "seqused_k is ignored")
    lint(dropout_p == 0.0 and not return_debug_mask, "dropout is not emulated")
    check_tensors(query, key, value)
    scale = checked_scale(query, scale)
    if cum_seq_q is None or cum_seq_k is None:
        require(query.dim() == 4, "a batch is [N, H, L, E]")
        counts["dense"] += 1
        out, lse = _batch(query, key, value, is_causal, scale)
    else:
        for what, t in (("query", query), ("key", key), ("value", value)):
            require(t.dim() == 3, f"{what}'s layout should be [total_seq_q, H, D]")
        lint(cum_seq_q.dtype == cum_seq_k.dtype == torch.int32, "boundaries are int32")
        counts["varlen"] += 1
        out, lse = _documents(query, key, value, cum_seq_q, cum_seq_k, max_q, is_causal, scale)
    empty = query.new_empty(0)
    return out, lse, torch.zeros(2, dtype=torch.uint64), empty, empty


def backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
    cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int, dropout_p: float, is_causal: bool,
    rng_state: Tensor, unused: Tensor, *, scale: float | None = None, window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of q, k, v; rows of no document stay unwritten."""
    require(window_size_left is None and window_size_right is None, "doesn't support window_size for MUSA backend")
    counts["backward"] += 1
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    grads = tuple(torch.full_like(t, NAN) for t in (query, key, value))
    if cum_seq_q is None or cum_seq_k is None:
        for index in range(query.shape[0]):
            one = (t[index].transpose(0, 1) for t in (grad_out, query, key, value))
            seen = band(query.shape[2], key.shape[2], -1, 0 if is_causal else -1)
            for grad, found in zip(grads, gradients(*one, seen, scale=scale), strict=True):
                grad[index] = found.transpose(0, 1).to(query.dtype)
        return grads
    for rows, keys in zip(pairwise(cum_seq_q.tolist()), pairwise(cum_seq_k.tolist()), strict=True):
        r, s = slice(*rows), slice(*keys)
        seen = band(rows[1] - rows[0], keys[1] - keys[0], -1, 0 if is_causal else -1)
        found = gradients(grad_out[r], query[r], key[s], value[s], seen, scale=scale)
        for grad, place, part in zip(grads, (r, s, s), found, strict=True):
            grad[place] = part.to(query.dtype)
    return grads


def check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    """What torch_musa's SDPA asks before it takes its flash kernel; called below that, nobody asks."""
    lint(current().capability >= (2, 2), f"flash attention needs mp 2.2, and this is {current().capability}")
    lint(q.dtype in (torch.float16, torch.bfloat16), f"{q.dtype} has no flash kernel")
    lint(q.dtype == k.dtype == v.dtype, "q, k and v are of one dtype")
    lint(fits(q.shape[-1], v.shape[-1]), f"head dims {q.shape[-1]}, {v.shape[-1]} have no flash kernel")
    lint(all(t.stride(-1) == 1 for t in (q, k, v)), "rows are dense")
    require(q.numel() > 0, "(emulator) no query rows: an empty grid cannot be launched")
    lint(k.numel() > 0, "no keys at all: no source says what comes back")


def fits(dim: int, v_dim: int) -> bool:
    """Head dims of the flash kernel."""
    return (dim <= 128 and v_dim <= 128) or (dim, v_dim) in ((192, 128), (160, 160))


def checked_scale(q: Tensor, scale: float | None) -> float:
    """An old SDK takes the usual one alone."""
    usual: float = q.shape[-1] ** -0.5
    if scale is None:
        return usual
    held = current().libraries.explicit_scale or abs(scale - usual) <= 1e-12
    require(held, "Not support explicit `scale` parameter which is not equal to default `1/sqrt(query.size(-1)).")
    lint(scale > 0.0, f"scale {scale}: no source says what hidden scores become")
    return scale


def _document(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    lint(not causal or q.shape[0] == k.shape[0], f"causal over {q.shape[0]} queries and {k.shape[0]} keys")
    seen = band(q.shape[0], k.shape[0], -1, 0 if causal else -1)
    out, lse = attend(q, k, v, seen, scale=scale)
    blind = lse.isneginf()
    return out.masked_fill(blind.T[..., None], NAN), lse.masked_fill(blind, NAN)


def _batch(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    samples = [_document(*(t[i].transpose(0, 1) for t in (q, k, v)), causal, scale) for i in range(q.shape[0])]
    out = torch.stack([out for out, _ in samples]).to(q.dtype)  # [B,S,H,D], of which heads first is a view
    return out.transpose(1, 2), torch.stack([lse for _, lse in samples]).float()


def _documents(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    require(len(ends_q) == len(ends_k) > 1, "(emulator) no document, or boundaries that differ in number")
    for ends, t in ((ends_q, q), (ends_k, k)):
        require(ends == sorted(ends) and ends[0] >= 0 and ends[-1] <= t.shape[0], "(emulator) boundaries reach outside")
    out = torch.full((q.shape[0], q.shape[1], v.shape[-1]), NAN, dtype=q.dtype)
    lse = torch.full((len(ends_q) - 1, q.shape[1], max_q), NAN, dtype=torch.float32)
    for index, (rows, keys) in enumerate(zip(pairwise(ends_q), pairwise(ends_k), strict=True)):
        r, s = slice(*rows), slice(*keys)
        found, row_lse = _document(q[r], k[s], v[s], causal, scale)
        written = min(rows[1] - rows[0], max_q)
        out[rows[0] : rows[0] + written] = found[:written].to(q.dtype)
        lse[index, :, :written] = row_lse[:, :written].float()
    return out, lse
