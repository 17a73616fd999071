"""segments: spans through a dense slot, one call for each piece of queries that lies inside or outside all spans."""

from __future__ import annotations

from functools import partial
from itertools import groupby
from typing import NamedTuple

import torch

from polyattn.backends.band import joined
from polyattn.backends.calls import Result, SlotCall, wants_grad, written
from polyattn.backends.derived import derived
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
    plan = derived(meta, "batches", lambda: _batches(meta))
    results = [
        piecewise(
            inner, *(_samples(tensor, rows, index) for tensor in (q, k, v)),
            segments=meta.segments(rows[0], q.shape[1], k.shape[1]),
            scale=scale, softcap=softcap, need_lse=need_lse, options=options,
        )
        for rows, index in plan.batches
    ]  # fmt: skip
    if len(results) == 1:
        return written(out, results[0][0]), results[0][1]
    result = torch.cat([piece for piece, _ in results])
    lse = torch.cat([lse for _, lse in results if lse is not None]) if need_lse else None
    if plan.order is not None:
        result, lse = result.index_select(0, plan.order), None if lse is None else lse.index_select(0, plan.order)
    return written(out, result), lse


def spans_into(
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
    """As `spans`, over a slot that writes into the buffer it is given: each piece goes straight to its rows."""
    if wants_grad(q, k, v):
        return spans(
            inner, q, k, v, out, meta=meta, causal=causal, scale=scale, window=window, softcap=softcap,
            need_lse=need_lse, options=options,
        )  # fmt: skip
    result = q.new_empty(*q.shape[:-1], v.shape[-1]) if out is None else out
    lses: list[torch.Tensor] = []
    for first, count in derived(meta, "runs", lambda: _runs(meta)):
        pieces: list[torch.Tensor] = []
        one, keys, values, target = (tensor.narrow(0, first, count) for tensor in (q, k, v, result))
        for start, end, seen, diagonal in meta.segments(first, q.shape[1], k.shape[1]):
            rows, place = one.narrow(1, start, end - start), target.narrow(1, start, end - start)
            if seen > 0:
                _, lse = inner(
                    rows, keys.narrow(1, 0, seen), values.narrow(1, 0, seen), place, meta=None, causal=diagonal,
                    scale=scale, window=None, softcap=softcap, need_lse=need_lse, options=options,
                )  # fmt: skip
            else:
                nothing, lse = empty_attention(rows, keys, values, need_lse)
                place.copy_(nothing)
            if lse is not None:
                pieces.append(lse)
        if pieces:
            lses.append(pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2))
    if not need_lse:
        return result, None
    return result, lses[0] if len(lses) == 1 else torch.cat(lses)


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
                q.narrow(1, start, end - start), k.narrow(1, 0, seen), v.narrow(1, 0, seen), None,
                meta=None, causal=causal, scale=scale, window=None, softcap=softcap, need_lse=need_lse, options=options,
            )
            if seen > 0
            else empty_attention(q.narrow(1, start, end - start), k, v, need_lse)
            for start, end, seen, causal in segments
        ]
    )  # fmt: skip


def _runs(meta: SpansMeta) -> tuple[tuple[int, int], ...]:
    """Neighbouring samples with the same spans, as (first, count): they run as one batch of views."""
    runs: list[tuple[int, int]] = []
    for _, group in groupby(enumerate(meta.full), lambda sample: sample[1]):
        samples = list(group)
        runs.append((samples[0][0], len(samples)))
    return tuple(runs)


class _Plan(NamedTuple):
    """Samples that run together, with their index where they are not neighbours; what puts the results in order."""

    batches: tuple[tuple[tuple[int, ...], torch.Tensor | None], ...]
    order: torch.Tensor | None


def _batches(meta: SpansMeta) -> _Plan:
    groups = meta.groups()
    order = [row for group in groups for row in group]
    scattered = [group != tuple(range(group[0], group[-1] + 1)) for group in groups]
    indices = [
        torch.tensor(group, device="cpu").to(meta.device) if far else None
        for group, far in zip(groups, scattered, strict=True)
    ]
    restored = torch.tensor(order, device="cpu").argsort().to(meta.device) if any(scattered) else None
    return _Plan(tuple(zip(groups, indices, strict=True)), restored)


def _samples(tensor: torch.Tensor, rows: tuple[int, ...], index: torch.Tensor | None) -> torch.Tensor:
    """The given samples: a view where they are neighbours."""
    return tensor.narrow(0, rows[0], len(rows)) if index is None else tensor.index_select(0, index)
