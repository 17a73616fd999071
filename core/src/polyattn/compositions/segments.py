"""segments: spans through a dense slot, one call for each piece of queries that lies inside or outside all spans."""

from __future__ import annotations

from functools import partial

import torch

from polyattn.backends.band import joined
from polyattn.backends.calls import Result, SlotCall, written
from polyattn.backends.empty import empty_attention
from polyattn.compositions.facts import inner
from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts
from polyattn.structures.spans import Segment, SpansMeta


def lower(request: Request, features: Features) -> Request | str | None:
    """Causal attention: pieces outside the spans are, and those inside are plain dense."""
    if request.structure_kind != "spans" or "dense" not in features.kinds:
        return None
    return inner(request, "dense", request.q, request.k, request.v, StructureFacts(), causal=True)


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot, once a piece of every group of samples."""
    return partial(spans, inner)


def spans(
    inner: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: SpansMeta,
    causal: bool,
    scale: float,
    window: None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A spans slot over a dense one; samples with the same spans run as one batch. Causal or not, spans are."""
    queries, keys = q.shape[1], k.shape[1]
    groups = meta.groups()
    results = [
        piecewise(
            inner, *(_samples(tensor, group) for tensor in (q, k, v)), segments=meta.segments(group[0], queries, keys),
            scale=scale, softcap=softcap, need_lse=need_lse, options=options,
        )
        for group in groups
    ]  # fmt: skip
    if len(results) == 1:
        return written(out, results[0][0]), results[0][1]
    order = torch.tensor([row for group in groups for row in group]).argsort().to(q.device)
    result = torch.cat([piece for piece, _ in results]).index_select(0, order)
    lses = [lse for _, lse in results if lse is not None]
    return written(out, result), torch.cat(lses).index_select(0, order) if lses else None


def piecewise(
    inner: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    segments: tuple[Segment, ...],
    scale: float,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Samples [n,S,H,D] that share their spans: one dense call a segment, over the keys it sees."""
    return joined(
        [
            inner(
                q[:, start:end], k[:, :seen], v[:, :seen], None, meta=None, causal=causal, scale=scale, window=None,
                softcap=softcap, need_lse=need_lse, options=options,
            )
            if seen > 0
            else empty_attention(q[:, start:end], k, v, need_lse)
            for start, end, seen, causal in segments
        ]
    )  # fmt: skip


def _samples(tensor: torch.Tensor, rows: tuple[int, ...]) -> torch.Tensor:
    """The given samples: a view where they are evenly spaced, else a copy."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    if rows == tuple(range(rows[0], rows[-1] + 1, step)):
        return tensor[rows[0] : rows[-1] + 1 : step]
    return tensor[list(rows)]
