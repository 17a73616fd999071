"""pad: a head_dim outside a slot's list through the next larger one, zeros added to q and k, or to v, and cut off."""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.backends.calls import Result, SlotCall, written
from polyattn.compositions.facts import copied, inner
from polyattn.door.backend import Features
from polyattn.door.request import Request
from polyattn.door.resolution import listed
from polyattn.structures.video_meta import VideoTilesMeta


def lower(request: Request, features: Features) -> Request | str | None:
    """The least head dims that the slot lists; the scale is the caller's already."""
    width, value_width = request.head_dim, request.v_head_dim
    taken = features.head_dims
    if request.structure_kind not in features.kinds:
        return None
    if features.v_dim or width == value_width:
        target, value_target = _next(width, taken), _next(value_width, taken)
    else:
        target = value_target = _next(max(width, value_width), taken)
    if target is None or value_target is None:
        size = width if target is None else value_width
        return f"head_dim {size} not in {listed(taken or ())}, nor smaller than one of them"
    if (target, value_target) == (width, value_width):
        return None
    if request.structure_kind == "paged":
        return "padding the head_dim of a page pool would copy all of it"
    q, k = (copied(tensor, (*tensor.shape[:-1], target)) for tensor in (request.q, request.k))
    v = copied(request.v, (*request.v.shape[:-1], value_target))
    return inner(request, request.structure_kind, q, k, v, request.structure_facts)


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot at the lowered head dims."""
    return partial(padded, inner, lowered.head_dim, lowered.v_head_dim)


def padded(
    inner: SlotCall,
    width: int,
    value_width: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    **call: Any,
) -> Result:
    """Any slot over one of its kind with head dims `width` and `value_width`; `call` passes through as it came."""
    kept, meta = v.shape[-1], call["meta"]
    if isinstance(meta, VideoTilesMeta) and meta.gate is not None:
        call["meta"] = meta.with_gate(_widened(meta.gate, value_width))
    result, lse = inner(_widened(q, width), _widened(k, width), _widened(v, value_width), None, **call)
    return written(out, result.narrow(-1, 0, kept)), lse


def _widened(tensor: torch.Tensor, width: int) -> torch.Tensor:
    return tensor if tensor.shape[-1] == width else pad(tensor, (0, width - tensor.shape[-1]))


def _next(width: int, taken: Collection[int] | None) -> int | None:
    """The least size taken that holds `width`."""
    return width if taken is None or width in taken else min((size for size in taken if size >= width), default=None)
