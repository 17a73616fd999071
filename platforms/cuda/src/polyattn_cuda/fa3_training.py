"""Gradients for FlashAttention-3's forward: from cuDNN's backward, which takes its output and LSE as they are.

The registry's build has no backward, and cuDNN's is the fastest that torch brings (half the time of torch's own flash
backward on an H200).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from polyattn.vendor import Request, aligned, on_square, positive_scale, prefix, reachable
from polyattn_cuda.cudnn import one_key
from polyattn_cuda.fa3_operator import Result, Window, operator

_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


class _Attention(torch.autograd.Function):
    """q [B,Sq,H,D], k, v [B,Sk,Hk,D]; causal only where Sq == Sk, since cuDNN aligns it at the top left."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool
    ) -> torch.Tensor:
        out, lse, _, _ = operator()(
            q, k, v, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None,
            None, None, None, None, scale, causal, -1, -1, 0, 0.0, False, None, 1, None, 0,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale, ctx.causal = scale, causal
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
        grads = _backward(
            *(tensor.transpose(1, 2) for tensor in (reachable(grad), q, k, v, out)), lse.unsqueeze(3), no_dropout,
            no_dropout, None, None, None, q.shape[1], k.shape[1], 0.0, ctx.causal, scale=ctx.scale,
        )  # fmt: skip
        return (*(tensor.transpose(1, 2) for tensor in grads), None, None)


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Every query over every key, with gradients. Whatever the request wanted beside that is not claimed."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    if k.shape[1] == 1 and not causal:
        return one_key(q, k, v, None, scale, need_lse=False)

    def square(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Result:
        if k.shape[1] == 1:
            return one_key(q, k, v, None, scale, need_lse=False)
        return _Attention.apply(reachable(q), reachable(k), reachable(v), scale, causal), None  # type: ignore[no-untyped-call]

    return on_square(square, q, k, v, need_lse=False) if causal else square(q, k, v)


def bound_dense(request: Request, options: tuple[object, ...]) -> Callable[..., Result] | None:
    """`dense` for one shape: what strides and scale decide is decided once."""
    facts = (request.q, request.k, request.v)
    square = request.k.shape[1] > 1 and (not request.causal or request.q.shape[1] == request.k.shape[1])
    usual = square and not request.autocast_dtype and request.scale > 0.0
    if not usual or not all(aligned(f.stride) for f in facts):
        return None
    scale, causal, apply = request.scale, request.causal, _Attention.apply

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, *, meta: None) -> Result:
        if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            q, k, v = reachable(q), reachable(k), reachable(v)
        return apply(q, k, v, scale, causal), None  # type: ignore[no-untyped-call]

    return run


prefix_kv = partial(prefix, dense)
