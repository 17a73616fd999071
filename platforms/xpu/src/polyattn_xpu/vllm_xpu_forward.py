"""The slots of vllm-xpu-kernels, which knows packed documents alone: dense, padding and pages are such documents."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.vendor import (
    TORCH_ROWS,
    KeyPaddingMeta,
    PackedMeta,
    PagedMeta,
    derived,
    empty_attention,
    positive_scale,
    prefix,
    varlen,
    varlen_padding,
)
from polyattn_xpu import vllm_xpu_build
from polyattn_xpu.sight import blank_blind, every_row_sees

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None

#: What the package's function is called with, by name: its order is vLLM's, not FlashAttention's.
_ARGUMENTS = frozenset(
    (
        "q", "k", "v", "max_seqlen_q", "cu_seqlens_q", "max_seqlen_k", "cu_seqlens_k", "seqused_k", "block_table",
        "softmax_scale", "causal", "return_softmax_lse", "out",
    )
)  # fmt: skip


@lru_cache(maxsize=1)
def _operator() -> Callable[..., Any]:
    """`flash_attn_varlen_func`, once it is known to have its kernels and to take what it is given."""
    module = importlib.import_module(vllm_xpu_build.MODULE)
    failure = vllm_xpu_build.load_failure()
    if failure:
        raise ImportError(failure)
    function: Callable[..., Any] = module.flash_attn_varlen_func
    lacking = sorted(_ARGUMENTS - set(inspect.signature(function).parameters))
    if lacking:
        raise RuntimeError(
            f"{vllm_xpu_build.PACKAGE}: flash_attn_varlen_func does not take {', '.join(lacking)}; "
            "install 0.1.16 or later, or choose another backend"
        )
    return function


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
    _takes(window, softcap)
    if q.shape[0] == 0 or k.shape[0] == 0 or max_k == 0:
        result, lse = empty_attention(q, k, v, need_lse)
        return (result if out is None else out.copy_(result)), lse
    lengths = {"cu_seqlens_k": cu_k}
    with_lse = need_lse or (q.shape[-1] == 192 and not causal)  # the only form compiled
    result, lse = _attend(
        q, k.contiguous(), v.contiguous(), out, cu_q, max_q, max_k, causal, scale, with_lse, lengths
    )  # fmt: skip
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
        blank_blind(result, lse, cu_q, cu_k, k.shape[0], causal)
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
    every = every_row_sees((q.shape[1],), (k.shape[1],), causal)
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
    every = meta.fixed and every_row_sees(meta.lengths_q, meta.lengths_k, causal)
    kernel = documents if every else blanked
    return varlen.packed(kernel, TORCH_ROWS, q, k, v, out, meta=meta, causal=causal, **call)


def key_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *, meta: KeyPaddingMeta, **call: Any
) -> Result:
    """Kept keys side by side, one document a sample."""
    kernel = documents if meta.lengths is not None and all(meta.lengths) else blanked
    return varlen_padding.key_padding(kernel, TORCH_ROWS, q, k, v, out, meta=meta, **call)


prefix_kv = partial(prefix, dense)


def paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Queries [B,Sq,H,D] or packed [T,H,D] over pages; the host knows the table and the lengths."""
    _takes(window, softcap)
    layout, pages = q.shape[:-2], k.shape[0]
    tokens, place = q, out
    if len(layout) == 2:
        cu_q, max_q = varlen.even_boundaries(*layout, q.device), layout[1]
        tokens, place = q.flatten(0, 1), None if out is None else varlen.flat_rows(out)
    else:
        cu_q, max_q = meta.cu_q, max(meta.host_q or (0,))
    kept = meta.host_kv or (0,)
    if tokens.shape[0] == 0 or pages == 0 or max(kept) == 0 or meta.block_table.shape[1] == 0:
        result, _ = empty_attention(q, k, v, need_lse)
        return (result if out is None else out.copy_(result)), None
    # an entry past a row's length may name no page, and the package reads one page even of a row without keys
    table = derived(meta, ("table", pages), lambda: meta.block_table.clamp(0, pages - 1).contiguous())
    lengths = {"seqused_k": meta.kv_lengths, "block_table": table}
    result, _ = _attend(tokens, k, v, place, cu_q, max_q, max(kept), causal, scale, need_lse, lengths)
    asked = meta.host_q if len(layout) == 1 else (layout[1],) * layout[0]
    if not every_row_sees(asked, meta.host_kv, causal):
        cu_k = derived(meta, "cu_k", lambda: pad(meta.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0)))
        blank_blind(result, None, cu_q, cu_k, sum(kept), causal)
    if len(layout) == 2:
        result = result.unflatten(0, layout)
    return (result if out is None else out if place is not None else out.copy_(result)), None


def _takes(window: Window, softcap: float) -> None:
    """Against what no slot claims: the package would drop a softcap, and run a window in PyTorch."""
    if window is not None or softcap:
        raise ValueError(f"vllm-xpu-kernels takes no window and no softcap here, asked {window} and {softcap}")


def _attend(
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
    """One call; it always gets a place to write, which its releases differ about making."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    place = out if out is not None and out.is_contiguous() else q.new_empty(*q.shape[:-1], v.shape[-1])
    answer = _operator()(
        q=q.contiguous(), k=k, v=v, max_seqlen_q=max_q, cu_seqlens_q=cu_q, max_seqlen_k=max_k, softmax_scale=scale,
        causal=causal, return_softmax_lse=with_lse, out=place, **lengths,
    )  # fmt: skip
    result, lse = answer if with_lse else (answer, None)
    return (result if out is None or out is place else out.copy_(result)), lse
