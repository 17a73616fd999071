"""A kernel of plain matmul and softmax over blocks of queries: slower than fused ones, and does everything.

Scores are computed in float32 (float64 for float64), a block of query rows at a time, so that memory stays bounded; the
backward pass recomputes them. It has an LSE with gradients, softcap, and gradients of an additive mask.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from polyattn.backends.calls import Result, wants_grad

#: Scores held at once (16 MiB of float32 each for the scores and their weights).
_SCORES = 1 << 22


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What scores of `dtype` tensors are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: torch.Tensor | None,
    causal: bool,
    scale: float,
    softcap: float,
    need_lse: bool,
) -> Result:
    """Softmax attention; the arguments are `calls.Kernel`'s."""
    batch, queries, heads, _ = q.shape
    keys, values = (t.to(compute_dtype(q.dtype)).permute(0, 2, 1, 3) for t in (k, v))
    rows = min(queries, max(1, _SCORES // max(1, batch * heads * k.shape[1])))
    recompute = rows < queries and wants_grad(q, k, v, *(() if mask is None else (mask,)))
    block = partial(_block, scale=scale, softcap=softcap)
    outs, lses = [], []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        visible, seen = _mask_rows(mask, start, stop), k.shape[1]
        if causal:
            visible, seen = _triangle(start, stop, q.device), stop
        given = (q.narrow(1, start, stop - start), keys.narrow(2, 0, seen), values.narrow(2, 0, seen), visible)
        if recompute:
            out, lse = checkpoint(block, *given, use_reentrant=False, preserve_rng_state=False)
        else:
            out, lse = block(*given)
        outs.append(out)
        lses.append(lse)
    whole = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    if not need_lse:
        return whole, None
    return whole, (lses[0] if len(lses) == 1 else torch.cat(lses, dim=2)).float()


def _block(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, *, scale: float, softcap: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,rows,H,D], k [B,Hk,Sk,D], v [B,Hk,Sk,Dv] -> out [B,rows,H,Dv] in q's dtype, lse [B,H,rows] in k's."""
    batch, rows, heads, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    group = heads // kv_heads
    # query heads that share a KV head are rows of one product: nothing is repeated
    folded = q.to(k.dtype).permute(0, 2, 1, 3).reshape(batch, kv_heads, group * rows, q.shape[3])
    scores = (folded * scale) @ k.transpose(-1, -2)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(batch, heads, rows, keys)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.where(mask, float("-inf"))
    elif mask is not None:  # hidden whatever q holds: NaN survives an addition
        scores = (scores + mask.to(k.dtype)).masked_fill(mask.isneginf(), float("-inf"))
    peak = scores.detach().amax(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak.isneginf(), 0.0)
    weights = (scores - peak).exp()
    total = weights.sum(dim=-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    out = weights.view(batch, kv_heads, group * rows, keys) @ v
    out = out.view(batch, heads, rows, v.shape[3]) / total
    lse = (peak + total.log()).masked_fill(empty, float("-inf")).squeeze(-1)
    return out.permute(0, 2, 1, 3).to(q.dtype), lse


def _mask_rows(mask: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return mask if mask is None or mask.shape[2] == 1 else mask.narrow(2, start, stop - start)


def _triangle(start: int, stop: int, device: torch.device) -> torch.Tensor:
    return torch.ones(1, 1, stop - start, stop, dtype=torch.bool, device=device).tril(start)
