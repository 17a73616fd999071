"""The answer where there is nothing to attend to: zeros, LSE -inf."""

from __future__ import annotations

import torch

from polyattn.backends.calls import Result, wants_grad


def empty_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, need_lse: bool) -> Result:
    """Zeros of q's rows and v's head_dim, LSE -inf, for q [B,Sq,H,D] or [T,H,D].

    The zeros hang on q, k and v in autograd's graph, so that a backward pass through them gives zero gradients.
    """
    out = q.new_zeros(*q.shape[:-1], v.shape[-1])
    if wants_grad(q, k, v):
        out = out + sum(tensor.narrow(-1, 0, 0).sum() for tensor in (q, k, v))
    if not need_lse:
        return out, None
    rows = q.shape[:-1]
    shape = (rows[1], rows[0]) if len(rows) == 2 else (rows[0], rows[2], rows[1])
    return out, q.new_full(shape, float("-inf"), dtype=torch.float32)
