"""The slots of FlashAttention-3: dense, prefix padding without a copy, packed documents, spans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from polyattn.vendor import (
    KeyPaddingMeta,
    PackedMeta,
    Request,
    aligned,
    document_loop,
    positive_scale,
    prefix_into,
    reachable,
    spans_into,
    varlen,
    varlen_padding,
    walkable,
)
from polyattn_cuda.fa3_operator import REACH, Result, Window, attend, operator, placed, sides, splits
from polyattn_cuda.repair import repair_documents, repair_samples
from polyattn_cuda.rows import ROWS


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
    """Every query over every key, at any strides that the device's copy engine can walk."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    if not (walkable(q) and walkable(k) and walkable(v)):
        q, k, v = reachable(q), reachable(k), reachable(v)
    place = out if out is None or walkable(out) else None
    result, lse = attend(
        q, k, v, place, causal=causal, scale=scale, window=window, softcap=softcap, splits=splits(q.shape, k.shape)
    )
    return placed(result, place, out), lse if need_lse else None


def bound_dense(request: Request, options: tuple[object, ...]) -> Callable[..., Result] | None:
    """`dense` for one shape: what strides, scale and window decide is decided once."""
    facts = (request.q, request.k, request.v)
    if request.out or request.autocast_dtype or request.scale <= 0.0 or not all(aligned(f.stride) for f in facts):
        return None
    call, need_lse = operator(), request.lse
    left, right = sides(request.window)
    scale, causal, softcap, window = request.scale, request.causal, request.softcap, request.window
    number = splits(request.q.shape, request.k.shape)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, *, meta: None) -> Result:
        plain = type(q) is type(k) is type(v) is torch.Tensor
        if not plain or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return dense(
                q, k, v, out, meta=meta, causal=causal, scale=scale, window=window, softcap=softcap,
                need_lse=need_lse, options=options,
            )  # fmt: skip
        result, lse, _, _ = call(
            q, k, v, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None,
            None, None, None, None, scale, causal, left, right, 0, softcap, False, None, number, None, 0,
        )  # fmt: skip
        return result, lse if need_lse else None

    return run


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
    """The varlen kernel of `polyattn.vendor.varlen`."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    q, k, v = reachable(q), reachable(k), reachable(v)
    place = out if out is None or walkable(out) else None
    result, lse = attend(
        q, k, v, place, causal=causal, scale=scale, window=window, softcap=softcap,
        cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k,
    )  # fmt: skip
    repair_documents(
        q, k, v, result, lse if need_lse else None, (causal, scale, window, softcap),
        cu_q=cu_q, cu_k=cu_k, max_q=max_q, reach=REACH,
    )  # fmt: skip
    return placed(result, place, out), lse if need_lse else None


def key_padding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Prefixes in place, by their lengths on the device; padding with holes packed."""
    if not meta.prefix:
        return varlen_padding.key_padding(
            documents, ROWS, q, k, v, out, meta=meta, causal=causal, scale=scale, window=window, softcap=softcap,
            need_lse=need_lse, options=options,
        )  # fmt: skip
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    q, k, v = reachable(q), reachable(k), reachable(v)
    place = out if out is None or walkable(out) else None
    used = meta.seqused
    asked = None if meta.queries == "all" else used
    result, lse = attend(
        q, k, v, place, causal=causal, scale=scale, window=window, softcap=softcap, used_q=asked, used_k=used
    )
    row_lse = lse if need_lse else None
    if asked is not None:
        ROWS.clear(result, row_lse, asked)
    repair_samples(q, k, v, result, row_lse, (causal, scale, window, softcap), used_q=asked, used_k=used, reach=REACH)
    return placed(result, place, out), lse if need_lse else None


prefix_kv = partial(prefix_into, dense)


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *, meta: PackedMeta, **call: Any
) -> Result:
    """Documents by their boundaries on the device; a single one, which the host knows, as dense attention on views."""
    if meta.fixed and meta.lengths_q is not None and len(meta.lengths_q) == 1:
        return varlen.one_document(dense, q, k, v, out, meta=meta, **call)
    return varlen.packed(documents, ROWS, q, k, v, out, meta=meta, **call)


spans = partial(spans_into, dense)
packed_spans = partial(document_loop, dense)
