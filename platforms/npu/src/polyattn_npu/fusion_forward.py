"""The slots of `fusion` over samples [B,S,H,D]: dense, prefixes of keys, masks, biases and spans."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from polyattn.vendor import Request, Result, prefix_into, spans_into
from polyattn_npu import samples
from polyattn_npu.bands import compressed_mask
from polyattn_npu.fusion_operator import SIDES, attend

dense = partial(samples.dense, attend, SIDES)
prefix_kv = partial(prefix_into, dense)
spans = partial(spans_into, dense)
mask = partial(samples.mask, attend)


def bound_dense(request: Request, options: tuple[object, ...]) -> Callable[..., Result] | None:
    """`dense` for one shape, plain or causal: which mode it is, is decided once. The mask is the device's own."""
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
