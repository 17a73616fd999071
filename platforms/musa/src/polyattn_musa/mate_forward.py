"""The slots of mate, Moore Threads' FlashAttention-3 for MUSA: dense, padded and packed rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from polyattn.vendor import (
    TORCH_ROWS,
    KeyPaddingMeta,
    PackedMeta,
    empty_attention,
    flash2,
    positive_scale,
    prefix,
    sight,
    varlen,
    varlen_padding,
)
from polyattn_musa.apart import apart, in_tiles
from polyattn_musa.mate_package import operators

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None


def bounds(causal: bool, window: Window, softcap: float, keys: int) -> tuple[bool, tuple[int, int]]:
    """Causal and the window in its words.

    What causal alone says is said by it alone: a right side of 0 ends in an assertion of its faster kernel. That kernel
    drops a softcap too, and is left for calls with a window: one as wide as all keys hides nothing.
    """
    left, right = flash2.sides(causal, window)
    if left < 0 and right == 0:
        causal, right = True, -1
    if softcap and left < 0 and right < 0:
        left = keys
    return causal, (left, right)


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
    """Every query over every key; it writes no buffer, so that `out` is copied into."""
    if 0 in (q.shape[0], q.shape[1], k.shape[1]):
        result, lse = empty_attention(q, k, v, need_lse)
        return (result if out is None else out.copy_(result)), lse
    blind = sight.blind_rows(q.shape[1], k.shape[1], causal, window)
    k, v = flash2.within_reach(q, k, v, window)
    attend, _ = operators()
    result, lse = called(attend, q, k, v, causal, scale, window, softcap, need_lse, {})
    if blind:
        result.narrow(1, 0, blind).zero_()
        if lse is not None:
            lse.narrow(2, 0, blind).fill_(float("-inf"))
    return (result if out is None else out.copy_(result)), lse


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
    """The varlen kernel of `polyattn.vendor.varlen` where each row sees a key and documents end with tiles.

    Elsewhere, as `kernel_for` has it.
    """
    if q.shape[0] == 0 or k.shape[0] == 0 or max_k == 0:
        result, lse = empty_attention(q, k, v, need_lse)
        return (result if out is None else out.copy_(result)), lse
    _, attend = operators()
    lengths = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}
    result, lse = called(attend, q, k, v, causal, scale, window, softcap, need_lse, lengths)
    return (result if out is None else out.copy_(result)), lse


def blanked(
    kernel: varlen.VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """As `kernel`; rows that see no key, of which its faster kernel says nothing, are 0."""
    result, lse = kernel(q, k, v, out, cu_q=cu_q, cu_k=cu_k, causal=causal, window=window, **call)
    if cu_q is not cu_k:  # shared boundaries leave no such row
        sight.blank_blind(result, lse, cu_q, cu_k, k.shape[0], causal, window)
    return result, lse


def kernel_for(keys: tuple[int, ...] | None, every_sees: bool) -> varlen.VarlenKernel:
    """`documents` with what documents of so many keys need; None: the host does not know how many."""
    kernel: varlen.VarlenKernel = documents if in_tiles(keys) else partial(apart, documents)
    return kernel if every_sees else partial(blanked, kernel)


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """N documents by their boundaries on the device."""
    queries, keys = (meta.lengths_q, meta.lengths_k) if meta.fixed else (None, None)
    kernel = partial(flash2.documents, kernel_for(keys, sight.every_row_sees(queries, keys, causal, window)))
    return varlen.packed(kernel, TORCH_ROWS, q, k, v, out, meta=meta, causal=causal, window=window, **call)


def key_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *, meta: KeyPaddingMeta, **call: Any
) -> Result:
    """Kept keys side by side, one document a sample."""
    return varlen_padding.key_padding(kernel_for(meta.lengths, False), TORCH_ROWS, q, k, v, out, meta=meta, **call)


prefix_kv = partial(prefix, dense)


def called(
    attend: Callable[..., Any],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    lengths: dict[str, Any],
) -> Result:
    """One call of either function, its answer unwrapped; `lengths` is what the packed one takes beside."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    keys = k.shape[0] * k.shape[1] if k.dim() == 4 else k.shape[0]
    causal, window_size = bounds(causal, window, softcap, keys)
    answer = attend(
        q=q.contiguous(), k=k.contiguous(), v=v.contiguous(), softmax_scale=scale, causal=causal,
        window_size=window_size, softcap=softcap, return_softmax_lse=need_lse, **lengths,
    )  # fmt: skip
    return (answer[0], answer[1]) if need_lse else (answer, None)
