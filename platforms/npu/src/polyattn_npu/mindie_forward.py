"""MindIE-SD's attention_forward: dense, prefixes of keys, boolean masks."""

from __future__ import annotations

import os
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from polyattn.vendor import MaskMeta, Result, Window, derived, masked, positive_scale, prefix, written
from polyattn_npu import detection
from polyattn_npu.detection import FA_TYPE
from polyattn_npu.mindie_package import package
from polyattn_npu.options import LAYOUT, NpuOptions, automatic_op, npu_options


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    keep: torch.Tensor | None,
    scale: float,
    options: tuple[object, ...],
) -> torch.Tensor:
    """One call: q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> [B,Sq,H,Dv].

    `keep` is bool in a shape of `exact`, True = may attend: MindIE-SD inverts it on the way down.
    """
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    chosen = npu_options(options)
    how = {"opt_mode": "static"} if chosen.opt_mode == "static" else _manual(chosen, str(q.device))
    result: torch.Tensor = package().attention_forward(q, k, v, attn_mask=keep, scale=float(scale), fused=True, **how)
    return result


def _manual(chosen: NpuOptions, device: str) -> dict[str, str]:
    op = chosen.op_type or automatic_op(_arch(device))
    undisturbed(op)
    return {"opt_mode": "manual", "op_type": op, "layout": chosen.op_layout or LAYOUT}


def undisturbed(op: str) -> None:
    """RuntimeError where MindIE-SD would run another op: it reads its variable at every call, a route reads it once."""
    forced = os.environ.get(FA_TYPE)
    if forced and forced != op:
        raise RuntimeError(
            f"{FA_TYPE}={forced!r} would replace {op}; it was set after polyattn read it: pa.reload_environment()"
        )


@lru_cache(maxsize=64)
def _arch(device: str) -> str:
    return detection.machine(device).arch


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
    only_plain(causal, window, softcap, need_lse)
    result = attend(q, k, v, keep=None, scale=scale, options=options)
    return written(out, result), None


prefix_kv = partial(prefix, dense)


def mask(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: MaskMeta,
    causal: bool,
    window: Window,
    options: tuple[object, ...],
    **call: Any,
) -> Result:
    """A boolean mask, with causal and a window put into it. Fully masked rows are 0, not the mean of V."""
    batch, queries = q.shape[:2]
    key = ("mindie", batch, queries, causal, window)

    def under(
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
        only_plain(causal, None, softcap, need_lse)
        assert mask is not None
        shaped = derived(meta, key, lambda: exact(mask, batch, queries))
        result = attend(q, k, v, keep=shaped.keep, scale=scale, options=options)
        return result.masked_fill(shaped.fully_masked, 0.0), None

    return masked(under, _own_dtype, q, k, v, out, meta=meta, causal=causal, window=window, options=options, **call)


class ExactMask(NamedTuple):
    """A mask as the op takes it.

    keep          bool [B,H|1,Sq,Sk] or [1,1,Sq,Sk], a view where rows are shared
    fully_masked  bool [B|1,Sq,H|1,1]
    """

    keep: torch.Tensor
    fully_masked: torch.Tensor


def exact(mask: torch.Tensor, batch: int, queries: int) -> ExactMask:
    """From bool [B|1,H|1,Sq|1,Sk]: the op broadcasts nothing but a mask that all samples and heads share."""
    samples = 1 if mask.shape[0] == 1 and mask.shape[1] == 1 else batch
    keep = mask.expand(samples, mask.shape[1], queries, mask.shape[3])
    fully_masked = mask.any(dim=-1, keepdim=True).logical_not().expand(-1, -1, queries, -1)
    return ExactMask(keep, fully_masked.transpose(1, 2))


def only_plain(causal: bool, window: Window, softcap: float, need_lse: bool) -> None:
    """ValueError for what MindIE-SD's functions have no argument for."""
    given = {"causal": causal, "window": window, "softcap": softcap, "need_lse": need_lse}
    beyond = [f"{name}={value}" for name, value in given.items() if value]
    if beyond:
        raise ValueError(f"mindiesd's function has no argument for {', '.join(beyond)}")


def _own_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype
