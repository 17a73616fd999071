"""The slots of `fusion` and the call of `npu_fusion_attention` itself, with its LSE."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch

from polyattn.vendor import PackedMeta, Request, Result, document_loop, packed_rows, prefix_into, spans_into
from polyattn_npu import batched, documents
from polyattn_npu.bands import compressed_mask, sparse_mode_args
from polyattn_npu.batched import no_softcap
from polyattn_npu.documents import Documents

#: The op's names of a window's two sides, in its own spelling.
WINDOW_ARGS = ("pre_tockens", "next_tockens")


@lru_cache(maxsize=1)  # torch.ops looks its entries up by name, and torch_npu adds this one when it is imported
def _operator() -> Callable[..., tuple[Any, ...]]:
    op: Callable[..., tuple[Any, ...]] = torch.ops.npu.npu_fusion_attention
    return op


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, need_lse: bool, **op_args: Any
) -> Result:
    """Attention of samples [B,S,H,D]: out [B,Sq,H,Dv], lse [B,H,Sq] | None, which has no gradient.

    `op_args` are the op's further arguments. The LSE of a row without a key is not -inf but some number.
    """
    out, maximum, total, *_ = _operator()(
        query=q, key=k, value=v, head_num=q.shape[2], input_layout="BSND", scale=float(scale), **op_args
    )
    return out, _lse(maximum, total) if need_lse else None


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: Documents,
    left: int | None,
    right: int | None,
    *,
    scale: float,
    need_lse: bool,
) -> Result:
    """Attention of documents side by side: a `documents.PackedOp`. Its LSE has no gradient."""
    op_args = sparse_mode_args(*parts.longest, left, right, q.device, WINDOW_ARGS)
    if need_lse:  # the statistics would lie in the order H, T within each document
        op_args["softmax_layout"] = "TND"
    out, maximum, total, *_ = _operator()(
        query=q, key=k, value=v, head_num=q.shape[1], input_layout="TND", scale=float(scale),
        actual_seq_qlen=list(parts.ends_q), actual_seq_kvlen=list(parts.ends_k), **op_args,
    )  # fmt: skip
    return out, _lse(maximum, total).transpose(0, 1) if need_lse else None


def _lse(maximum: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """From a row's maximum and its sum of exponentials, each of which the op writes eight times."""
    return maximum.select(-1, 0) + total.select(-1, 0).log()


dense = partial(batched.dense, attend, WINDOW_ARGS)
prefix_kv = partial(prefix_into, dense)
spans = partial(spans_into, dense)
mask = partial(batched.mask, attend)


def bound_dense(request: Request, options: tuple[object, ...]) -> Callable[..., Result] | None:
    """`dense` for one shape, plain or causal: which mode it is, is decided once. The mask is the device's own.

    `fusion` alone has this: it is asked first for such calls, so that the others hardly get one.
    """
    queries, keys = request.q.shape[1], request.k.shape[1]
    unusual = request.out or request.autocast_dtype or request.window is not None or request.scale <= 0.0
    if unusual or (request.causal and queries > keys):
        return None
    scale, need_lse = float(request.scale), request.lse

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, *, meta: None) -> Result:
        return attend(q, k, v, scale=scale, need_lse=need_lse)

    def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, *, meta: None) -> Result:
        seen = compressed_mask(q.device)
        return attend(q, k, v, scale=scale, need_lse=need_lse, atten_mask=seen, sparse_mode=3)

    return causal if request.causal and queries > 1 else plain


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    softcap: float,
    options: tuple[object, ...],
    **call: Any,
) -> Result:
    """Documents of lengths that the host knows, in one call."""
    no_softcap(softcap)
    return documents.packed(attend_packed, q, k, v, out, meta=meta, **call)


packed_spans = partial(document_loop, dense)
key_padding = partial(packed_rows, packed)
