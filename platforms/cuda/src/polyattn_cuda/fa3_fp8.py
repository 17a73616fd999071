"""FlashAttention-3 in FP8 (e4m3): q, k and v quantised with a scale a KV head, q and k rotated where that is asked."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from polyattn.vendor import KeyPaddingMeta, Quant, positive_scale, prefix, varlen, varlen_padding, walkable
from polyattn_cuda import quantise
from polyattn_cuda.fa3_operator import REACH, Result, Window, attend, placed
from polyattn_cuda.repair import repair_documents
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
    """Every query over every key."""
    return _samples(q, k, v, out, None, None, causal, scale, window, softcap, need_lse, options)


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
    """Prefixes by their lengths on the device, with zeros for what lies behind them; padding with holes packed."""
    if not meta.prefix:
        return varlen_padding.packed_padding(
            partial(documents, options=options), ROWS, q, k, v, out, meta=meta, causal=causal, scale=scale,
            window=window, softcap=softcap, need_lse=need_lse, options=options,
        )  # fmt: skip
    used = meta.seqused
    asked = None if meta.queries == "all" else used
    result, lse = _samples(q, k, v, out, asked, used, causal, scale, window, softcap, need_lse, options)
    if asked is not None:
        ROWS.clear(result, lse, used)
    return result, lse


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
    options: tuple[object, ...],
) -> Result:
    """The varlen kernel of `polyattn.vendor.varlen`. A document beside which values are strange is computed exactly."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    small = quantise.packed(q, k, v, _quant(options).rotate, cu_q, cu_k, max_q, max_k)
    place = out if out is not None and out.dtype == torch.bfloat16 and walkable(out) else None
    result, lse = attend(
        small.q, small.k, small.v, place, causal=causal, scale=scale, window=window, softcap=softcap,
        cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, descales=(small.q_descale, small.k_descale, small.v_descale),
    )  # fmt: skip
    result = result.to(q.dtype)
    row_lse = lse if need_lse else None
    repair_documents(
        q, k, v, result, row_lse, (causal, scale, window, softcap), cu_q=cu_q, cu_k=cu_k, max_q=max_q, reach=REACH
    )
    return placed(result, place, out), row_lse


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, **call: Any) -> Result:
    """Documents by their boundaries on the device."""
    return varlen.packed(partial(documents, options=call["options"]), ROWS, q, k, v, out, **call)


prefix_kv = partial(prefix, dense)


def _samples(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    used_q: torch.Tensor | None,
    used_k: torch.Tensor | None,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    small = quantise.batched(q, k, v, _quant(options).rotate, used_q, used_k)
    place = out if out is not None and out.dtype == torch.bfloat16 and walkable(out) else None
    result, lse = attend(
        small.q, small.k, small.v, place, causal=causal, scale=scale, window=window, softcap=softcap,
        used_q=used_q, used_k=used_k, descales=(small.q_descale, small.k_descale, small.v_descale),
    )  # fmt: skip
    return placed(result.to(q.dtype), place, out), lse if need_lse else None


def _quant(options: tuple[object, ...]) -> Quant:
    """What the core puts last among a quantised call's options."""
    quant = options[-1]
    assert isinstance(quant, Quant)
    return quant
