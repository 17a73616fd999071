"""What aiter's functions do with a call, whatever their signature: padding of head dims, results, gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from tests.emulators.cuda.flash2 import Document, check, check_boundaries
from tests.emulators.rocm import ck, stack
from tests.emulators.rocm.aiter_routes import Asked, run

#: What turns q, k, v into the packed rows and documents of a call.
Layout = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, list[Document]]]


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: Sequence[int],
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_lse: bool,
    return_attn_probs: bool,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_kv: torch.Tensor | None,
) -> Any:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], and lse [B,H,Sq] where asked.

    cu_seqlens_q and cu_seqlens_kv give the length of each sample as a difference; what lies behind it is padding.
    """
    _plain(dropout_p, alibi_slopes, return_attn_probs)
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_kv", cu_seqlens_kv)):
        if cu is not None:
            check(cu.dtype == torch.int32, f"expected scalar type Int for {name}")
            check_boundaries(name, cu, None)
    if bias is not None:
        check(bias.shape == (q.shape[1], k.shape[1]), "bias shape should be [sq, sk]")
    asked = Asked(
        scale=_scale(softmax_scale, q), causal=causal, window=_window(window_size), softcap=0.0, bias=_bias(bias, q),
        max_q=q.shape[1], max_k=k.shape[1], padded=cu_seqlens_q is not None or cu_seqlens_kv is not None, above=0,
    )  # fmt: skip

    def layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, list[Document]]:
        ck.check_tensors(q, k, v)
        parts = ck.samples(q, k, v)
        return q.flatten(0, 1), [_shorter(part, i, cu_seqlens_q, cu_seqlens_kv) for i, part in enumerate(parts)]

    return _call(q, k, v, layout, asked, deterministic, return_lse, None)


def _shorter(part: Document, index: int, cu_q: torch.Tensor | None, cu_k: torch.Tensor | None) -> Document:
    if cu_q is not None:
        rows = int(cu_q[index + 1] - cu_q[index])
        check(rows <= part.q1 - part.q0, "cu_seqlens_q: more rows than a sample has are read")
        part = part._replace(q1=part.q0 + rows)
    if cu_k is not None and part.rows is not None:
        keys = int(cu_k[index + 1] - cu_k[index])
        check(keys <= part.k.shape[0], "cu_seqlens_kv: more rows than a sample has are read")
        rows_k = slice(part.rows.start, part.rows.start + keys)
        part = part._replace(k=part.k[:keys], v=part.v[:keys], rows=rows_k)
    return part


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    min_seqlen_q: int,
    dropout_p: float,
    softmax_scale: float | None,
    logits_soft_cap: float,
    causal: bool,
    window_size: Sequence[int],
    bias: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    return_lse: bool,
    return_attn_probs: bool,
    block_table: torch.Tensor | None,
    out: torch.Tensor | None,
    cu_seqlens_q_padded: torch.Tensor | None,
    cu_seqlens_k_padded: torch.Tensor | None,
) -> Any:
    """q [T,H,D], k, v [Tk,Hk,D] or pages [N,page,Hk,D] -> out [T,H,Dv], and lse [H,T] where asked."""
    _plain(dropout_p, alibi_slopes, return_attn_probs)
    padded = (cu_seqlens_q_padded, cu_seqlens_k_padded)
    if any(cu is not None for cu in padded):
        if block_table is not None:
            raise NotImplementedError("Paged attention does not currently support cu_seqlens_*_padded")
        raise NotImplementedError("cu_seqlens_*_padded is not emulated")
    check(bias is None, "a bias of packed rows is not emulated")
    asked = Asked(
        scale=_scale(softmax_scale, q), causal=causal, window=_window(window_size), softcap=logits_soft_cap, bias=None,
        max_q=max_seqlen_q, max_k=max_seqlen_k, padded=False, above=min_seqlen_q, block_table=block_table, packed=True,
    )  # fmt: skip

    def layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, list[Document]]:
        ck.check_tensors(q, k, v)
        return q, ck.documents(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table)

    return _call(q, k, v, layout, asked, deterministic, return_lse, out)


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    asked: Asked,
    deterministic: bool,
    return_lse: bool,
    out: torch.Tensor | None,
) -> Any:
    width = v.shape[-1]
    padded = tuple(_of_eight(t) for t in (q, k, v))
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    assert return_lse or not wants_grad  # the package's own words: nothing more is said
    found, lse = _Attention.apply(*padded, layout, asked, deterministic, out)  # type: ignore[no-untyped-call]
    found = found[..., :width]
    return (found, lse) if return_lse else found


class _Attention(torch.autograd.Function):
    """The forward and its gradients; a gradient of the LSE is dropped without a word, as the package does."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: Layout,
        asked: Asked,
        deterministic: bool,
        out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        flat, parts = layout(q, k, v)
        shape = (*q.shape[:-1], v.shape[-1])
        written = torch.empty(*flat.shape[:-1], v.shape[-1], dtype=q.dtype)
        lse, scores = run(flat, v, parts, asked, written)
        ctx.save_for_backward(q, k, v)
        ctx.layout, ctx.asked, ctx.deterministic = layout, replace(asked, softcap=scores.softcap), deterministic
        result = written.view(shape)
        if out is not None:
            check(out.dtype == q.dtype, "Output must have the same dtype as inputs")
            check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
            check(out.shape == shape, "out must have shape (total_q, num_heads, head_size_v)")
            result = out.copy_(result)
        return result, lse if asked.packed else ck.per_sample(lse, q.shape[0])

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if dlse is not None and dlse.ne(0).any():
            stack.silent("aiter drops the gradient of its LSE")
        q, k, v = ctx.saved_tensors
        asked = ctx.asked
        check(asked.bias is None, "the gradient of a bias is not emulated")
        flat, parts = ctx.layout(q, k, v)
        rows_k, rows_v = (t if t.dim() == 3 else t.flatten(0, 1) for t in (k, v))
        dout = dout.contiguous().view(*flat.shape[:-1], -1)
        grads = ck.backward(
            dout, flat, rows_k, rows_v, parts, asked.scores, asked.max_q, asked.max_k, deterministic=ctx.deterministic
        )
        dq, dk, dv = (grad.view(t.shape) for grad, t in zip(grads, (q, k, v), strict=True))
        return dq, dk, dv, None, None, None, None


def _of_eight(t: torch.Tensor) -> torch.Tensor:
    """With a last axis of a multiple of 8, and contiguous in it."""
    t = torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t
    return t if t.stride(-1) == 1 else t.contiguous()


def _scale(scale: float | None, q: torch.Tensor) -> float:
    return float(q.shape[-1] ** -0.5) if scale is None else scale


def _window(window: Sequence[int]) -> tuple[int, int]:
    """Left and right; a third entry counts sink tokens."""
    if len(window) not in stack.now().build.window_items:
        stack.silent(f"aiter reads two entries of a window of {len(window)}")
    check(len(window) < 3 or window[2] == 0, "sink tokens are not emulated")
    return int(window[0]), int(window[1])


def _bias(bias: torch.Tensor | None, q: torch.Tensor) -> torch.Tensor | None:
    """A bias is read as if it had q's dtype, which nothing checks."""
    if bias is None:
        return None
    check(bias.stride(-1) == 1, "bias tensor must have contiguous last dimension")
    if bias.dtype != q.dtype:
        stack.silent(f"aiter reads a bias of {bias.dtype} as {q.dtype}")
        return torch.full_like(bias, float("nan"))
    return bias


def _plain(dropout_p: float, alibi_slopes: torch.Tensor | None, return_attn_probs: bool) -> None:
    check(dropout_p == 0.0 and alibi_slopes is None and not return_attn_probs, "alibi and dropout are not emulated")
