"""slice: one kept prefix of keys that all rows share, through a dense slot on views."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.backends.calls import Result, SlotCall, wants_grad, written
from polyattn.backends.empty import empty_attention
from polyattn.compositions.facts import inner, resized
from polyattn.compositions.rows import shifted
from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts
from polyattn.structures.key_padding import KeyPaddingMeta


def lower(request: Request, features: Features) -> Request | str | None:
    """Dense attention over the prefix."""
    length = request.structure_facts.common_prefix
    if request.structure_kind != "prefix_kv" or length is None or "dense" not in features.kinds:
        return None
    every = request.structure_facts.queries == "all"
    causal, window = shifted(request.causal, request.window, request.k.shape[1] - length if every else 0)
    if window is not None and any(side is not None and side < 0 for side in window):
        return f"window {request.window} does not reach back to the kept prefix of {length} keys as one window"
    q = request.q if every else resized(request.q, 1, length)
    k, v = resized(request.k, 1, length), resized(request.v, 1, length)
    return inner(request, "dense", q, k, v, StructureFacts(), causal=causal, window=window)


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot on views of the prefix."""
    return partial(prefix, inner)


def prefix(
    inner: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    causal: bool,
    scale: float,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A prefix_kv slot over a dense one."""
    length = meta.common_prefix
    assert length is not None
    every = meta.queries == "all"
    if length == 0:
        result, lse = empty_attention(q, k, v, need_lse)
        return written(out, result), lse
    causal, window = shifted(causal, window, k.shape[1] - length if every else 0)
    queries = q if every else q.narrow(1, 0, length)
    result, lse = inner(
        queries, k.narrow(1, 0, length), v.narrow(1, 0, length), None, meta=None, causal=causal, scale=scale,
        window=window, softcap=softcap, need_lse=need_lse, options=options,
    )  # fmt: skip
    if not every and length < q.shape[1]:
        result = pad(result, (0, 0, 0, 0, 0, q.shape[1] - length))
        lse = None if lse is None else pad(lse, (0, q.shape[1] - length), value=float("-inf"))
    return written(out, result), lse


def prefix_into(
    inner: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    **call: Any,
) -> Result:
    """As `prefix`, over a slot that writes into the buffer it is given: padded rows are zeroed, none is copied."""
    length = meta.common_prefix
    if meta.queries == "all" or not length or wants_grad(q, k, v):
        return prefix(inner, q, k, v, out, meta=meta, **call)
    result = q.new_empty(*q.shape[:-1], v.shape[-1]) if out is None else out
    queries, keys, values, place = (tensor.narrow(1, 0, length) for tensor in (q, k, v, result))
    _, lse = inner(queries, keys, values, place, meta=None, **call)
    result.narrow(1, length, q.shape[1] - length).zero_()
    return result, None if lse is None else pad(lse, (0, q.shape[1] - length), value=float("-inf"))
