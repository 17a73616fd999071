"""mask: whatever a slot lacks of padding, documents, spans, causal or windows, through its boolean or additive mask."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polyattn.backends.calls import Result, SlotCall, written
from polyattn.backends.derived import derived
from polyattn.backends.masked import over_heads, with_positions
from polyattn.backends.visibility import Visibility, Window, of_key_padding, of_packed, of_positions, of_spans
from polyattn.compositions.facts import batched, inner
from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts
from polyattn.structures.key_padding import KeyPaddingMeta
from polyattn.structures.mask import MaskMeta, mask_meta
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.spans import SpansMeta


def lower(request: Request, features: Features) -> Request | str | None:
    """A mask over all queries and keys, neither causal nor windowed. Documents become one sample of T rows."""
    kind, facts = request.structure_kind, request.structure_facts
    positions = request.causal or request.window is not None
    target = "bias" if kind == "bias" else "mask"
    if target not in features.kinds or kind in ("paged", "video_tiles", "block_map"):
        return None
    if kind in ("dense", "mask", "bias") and not positions:
        return None
    if request.capturing and facts.capacity:
        return "a mask of the documents would bake their lengths into the captured graph"
    q, k, v = (batched(t) if kind == "packed" else t for t in (request.q, request.k, request.v))
    samples, heads = (facts.mask_shape or (q.shape[0], 1))[:2] if kind in ("mask", "bias") else (q.shape[0], 1)
    alike = kind == "key_padding" and facts.queries == "all" and not positions  # all rows see what is kept
    shape = (1 if kind == "dense" else samples, heads, 1 if alike else q.shape[1], k.shape[1])
    masked = replace(StructureFacts(), host=facts.host, mask_shape=shape, mask_grad=facts.mask_grad)
    masked = replace(masked, mask_dtype=facts.mask_dtype if kind == "bias" else "bool")
    return inner(request, target, q, k, v, masked, causal=False, window=None)


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot under a mask."""
    return partial(under_mask, inner)


def under_mask(
    inner: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: Any,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A slot of any of these kinds over one for "mask" or "bias"; the mask is made once for all layers.

    Under one mask 0 * NaN would carry a document's NaN to its neighbours: strange keys are put aside.
    """
    packed = isinstance(meta, PackedMeta)
    if packed:
        q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if isinstance(meta, MaskMeta):
        mask = with_positions(meta, q.shape[1], k.shape[1], causal, window)
    else:
        blind, mask = _masks(meta, q, k, causal, window)
        q = q.masked_fill(blind, 0.0)  # what a padded query row holds must not matter, NaN included
    strange = None
    if packed:
        strange = over_heads((k.isfinite().all(-1) & v.isfinite().all(-1)).all(-1).logical_not())
        k, v = k.masked_fill(strange, 0.0), v.masked_fill(strange, 0.0)
    result, lse = inner(
        q, k, v, None, meta=mask, causal=False, scale=scale, window=None, softcap=softcap, need_lse=need_lse,
        options=options,
    )  # fmt: skip
    if strange is not None:
        assert mask.keep is not None
        sees = (mask.keep & strange.reshape(1, 1, 1, -1)).any(dim=-1)  # [1,1,T]: what these rows see is NaN by right
        result = result.masked_fill(sees.reshape(1, -1, 1, 1), float("nan")).squeeze(0)
        lse = None if lse is None else lse.masked_fill(sees, float("nan")).squeeze(0)
    return written(out, result), lse


def _masks(meta: Any, q: torch.Tensor, k: torch.Tensor, causal: bool, window: Window) -> tuple[torch.Tensor, MaskMeta]:
    """Query rows that see nothing [B|1,Sq,1,1], and the mask."""
    queries, keys = q.shape[1], k.shape[1]

    def build() -> tuple[torch.Tensor, MaskMeta]:
        seen = visibility_of(meta, queries, keys, causal, window, q.device)
        return over_heads(seen.blind_rows), mask_meta(seen.mask)

    if meta is None:
        return build()
    lengths = (meta.lengths_q, meta.lengths_k) if isinstance(meta, PackedMeta) else ()
    return derived(meta, ("mask", queries, keys, causal, window, lengths), build)


def visibility_of(meta: Any, queries: int, keys: int, causal: bool, window: Window, device: torch.device) -> Visibility:
    """What each query row sees, for the meta of any structure that is neither a mask nor paged."""
    if isinstance(meta, KeyPaddingMeta):
        return of_key_padding(meta, queries, keys, causal, window)
    if isinstance(meta, PackedMeta):
        return of_packed(meta, queries, keys, causal, window)
    if isinstance(meta, SpansMeta):
        return of_spans(meta, queries, keys)
    return of_positions(queries, keys, causal, window, device)
