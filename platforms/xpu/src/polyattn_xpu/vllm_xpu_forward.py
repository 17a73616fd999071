"""The slots of vllm-xpu-kernels, which knows packed documents alone: dense and padded rows are such documents."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.vendor import (
    TORCH_ROWS,
    KeyPaddingMeta,
    PackedMeta,
    empty_attention,
    positive_scale,
    prefix,
    sight,
    varlen,
    varlen_padding,
)
from polyattn_xpu.vllm_xpu_build import form, operator

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None


def documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
) -> Result:
    """The varlen kernel of `polyattn.vendor.varlen` where each row sees a key; else use `blanked`."""
    takes(window, softcap)
    if q.shape[0] == 0 or k.shape[0] == 0 or max_k == 0:
        result, lse = empty_attention(q, k, v, need_lse)
        return (result if out is None else out.copy_(result)), lse
    width = q.shape[-1]
    target, with_lse = form(width, causal, need_lse)
    place = out
    if target > width:
        q, k, v = (pad(tensor, (0, target - width)) for tensor in (q, k, v))
        place = None
    result, lse = attend(
        q, k.contiguous(), v.contiguous(), place, cu_q, max_q, max_k, causal, scale, with_lse, {"cu_seqlens_k": cu_k}
    )
    if target > width:
        result = result.narrow(-1, 0, width)
        result = result if out is None else out.copy_(result)
    return result, lse if need_lse else None


def blanked(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    causal: bool,
    **call: Any,
) -> Result:
    """As `documents`; rows that see no key, which the kernel makes NaN, are 0. Shared boundaries leave none such."""
    result, lse = documents(q, k, v, out, cu_q=cu_q, cu_k=cu_k, causal=causal, **call)
    if cu_q is not cu_k:
        sight.blank_blind(result, lse, cu_q, cu_k, k.shape[0], causal, None)
    return result, lse


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    **call: Any,
) -> Result:
    """Every query over every key: documents of one length."""
    every = sight.every_row_sees((q.shape[1],), (k.shape[1],), causal, None)
    return varlen.batched(documents if every else blanked, q, k, v, out, meta=meta, causal=causal, **call)


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    causal: bool,
    **call: Any,
) -> Result:
    """N documents by their boundaries on the device; [real, pad] is one of them, and needs no mask."""
    every = meta.fixed and sight.every_row_sees(meta.lengths_q, meta.lengths_k, causal, None)
    kernel = documents if every else blanked
    return varlen.packed(kernel, TORCH_ROWS, q, k, v, out, meta=meta, causal=causal, **call)


def key_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *, meta: KeyPaddingMeta, **call: Any
) -> Result:
    """Kept keys side by side, one document a sample."""
    kernel = documents if meta.lengths is not None and all(meta.lengths) else blanked
    return varlen_padding.key_padding(kernel, TORCH_ROWS, q, k, v, out, meta=meta, **call)


prefix_kv = partial(prefix, dense)


def takes(window: Window, softcap: float) -> None:
    """Against what no slot claims: the package would drop a softcap, and run a window in PyTorch."""
    if window is not None or softcap:
        raise ValueError(f"vllm-xpu-kernels takes no window and no softcap here, asked {window} and {softcap}")


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    cu_q: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    with_lse: bool,
    lengths: dict[str, torch.Tensor],
) -> Result:
    """One call: q [T,H,D], k and v packed or pools, by what `lengths` holds -> out [T,H,Dv], lse [H,T] | None.

    It always gets a place to write, which its releases differ about making. "Mixed" calls run two kernels, one of which
    writes a row for a document that has none.
    """
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    place = out if out is not None and out.is_contiguous() else q.new_empty(*q.shape[:-1], v.shape[-1])
    answer = operator()(
        q=q.contiguous(), k=k, v=v, max_seqlen_q=max_q, cu_seqlens_q=cu_q, max_seqlen_k=max_k, softmax_scale=scale,
        causal=causal, return_softmax_lse=with_lse, out=place, is_mix_batch=False, **lengths,
    )  # fmt: skip
    result, lse = answer if with_lse else (answer, None)
    return (result if out is None or out is place else out.copy_(result)), lse
