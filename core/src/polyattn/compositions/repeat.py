"""repeat: grouped-query attention through a slot without it, by repeating each KV head for its query heads."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from polyattn.backends.calls import Result, SlotCall, written
from polyattn.compositions.facts import copied, inner
from polyattn.door.backend import Features
from polyattn.door.request import Request


def lower(request: Request, features: Features) -> Request | str | None:
    """As many KV heads as query heads."""
    heads = request.num_heads
    if features.gqa or request.num_kv_heads == heads or request.structure_kind not in features.kinds:
        return None
    if request.structure_kind == "paged":
        return "repeating the KV heads of a page pool would copy all of it"
    k, v = (copied(t, (*t.shape[:-2], heads, t.shape[-1])) for t in (request.k, request.v))
    return inner(request, request.structure_kind, request.q, k, v, request.structure_facts)


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot on repeated KV heads."""
    return partial(repeated, inner)


def repeated(
    inner: SlotCall, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, **call: Any
) -> Result:
    """Any slot over one of its kind without GQA; `call` passes through as it came."""
    group = q.shape[-2] // k.shape[-2]
    result, lse = inner(q, k.repeat_interleave(group, dim=-2), v.repeat_interleave(group, dim=-2), None, **call)
    return written(out, result), lse
