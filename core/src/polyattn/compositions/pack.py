"""pack: key padding known on the host through a packed slot: only kept rows are computed."""

from __future__ import annotations

from functools import partial

import torch

from polyattn.backends.calls import Result, SlotCall, written
from polyattn.backends.derived import derived
from polyattn.backends.empty import empty_attention
from polyattn.compositions.facts import copied, inner
from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts
from polyattn.structures.host_data import boundaries
from polyattn.structures.key_padding import KeyPaddingMeta
from polyattn.structures.packed_meta import PackedMeta


def lower(request: Request, features: Features) -> Request | str | None:
    """One document a row. Causal and windows use the positions of the tensors as passed: packing must keep them."""
    facts = request.structure_facts
    if request.structure_kind != "key_padding" or "packed" not in features.kinds:
        return None
    if not facts.host:
        return "packing needs the padding's lengths on the host (KeyPadding.from_lengths)"
    if (request.causal or request.window is not None) and not (facts.prefix and facts.queries != "all"):
        return "packing would move the positions that causal and window use"
    q, k, v = (copied(t, (t.shape[0] * t.shape[1], *t.shape[2:])) for t in (request.q, request.k, request.v))
    documents = StructureFacts(documents=request.q.shape[0], same_lengths=facts.queries != "all")
    return inner(request, "packed", q, k, v, documents)


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot on the kept rows."""
    return partial(packed_rows, inner)


def packed_rows(
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
    """A key padding slot over a packed one; the indices of the kept rows are derived once for all layers."""
    batch, queries = q.shape[:2]
    keys, values = (tensor.flatten(0, 1).index_select(0, meta.indices) for tensor in (k, v))
    documents = derived(meta, ("packed", queries), lambda: _packed_meta(meta, batch, queries))
    every = meta.queries == "all"
    tokens = q.flatten(0, 1) if every else q.flatten(0, 1).index_select(0, meta.indices)
    if keys.shape[0] == 0:
        result, lse = empty_attention(tokens, keys, values, need_lse)
    else:
        result, lse = inner(
            tokens, keys, values, None, meta=documents, causal=causal, scale=scale, window=window, softcap=softcap,
            need_lse=need_lse, options=options,
        )  # fmt: skip
    if not every:
        result = result.new_zeros(batch * queries, *result.shape[1:]).index_copy(0, meta.indices, result)
        if lse is not None:
            lse = lse.new_full((lse.shape[0], batch * queries), float("-inf")).index_copy(1, meta.indices, lse)
    rows = result.unflatten(0, (batch, queries))
    return written(out, rows), None if lse is None else lse.unflatten(1, (batch, queries)).transpose(0, 1)


def _packed_meta(meta: KeyPaddingMeta, batch: int, queries: int) -> PackedMeta:
    lengths = meta.lengths
    assert lengths is not None
    longest = max(lengths, default=0)
    if meta.queries != "all":
        return PackedMeta(meta.cu_seqlens, meta.cu_seqlens, longest, longest, lengths, lengths, None)
    asked = (queries,) * batch
    cu_q = boundaries(asked).to(meta.keep.device)
    return PackedMeta(cu_q, meta.cu_seqlens, queries, longest, asked, lengths, None)
