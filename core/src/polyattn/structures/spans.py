"""Spans: causal attention in which a query inside a full span sees every key before the span's end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure
from polyattn.structures.host_data import host_integers, pairs_of

Pairs = tuple[tuple[tuple[int, int], ...], ...]


class QueryRange(NamedTuple):
    """Local query rows [local_start, local_end) that sit at global positions from `global_start`."""

    local_start: int
    local_end: int
    global_start: int


class Segment(NamedTuple):
    """Query rows [start, end) of one sample and the keys [0, kv_end) they see; causal ones end on the diagonal."""

    start: int
    end: int
    kv_end: int
    causal: bool


class Spans(Structure):
    """Per sample half-open full spans, sorted, disjoint, in global positions.

    The queries are the last Sq of Sk positions unless `query_ranges` ((local_start, local_end, global_start), contiguous
    from 0) says otherwise. Samples may differ.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 8, 2, 8)
    >>> pa.attention(q, q, q, structure=pa.Spans([[(2, 5)]])).shape
    torch.Size([1, 8, 2, 8])
    """

    kind: ClassVar[str] = "spans"
    full: Pairs
    query_ranges: tuple[QueryRange, ...] | None
    table: torch.Tensor

    def __init__(self, full: Any, query_ranges: Any = None) -> None:
        rows = pairs_of("full", full)
        ranges = None if query_ranges is None else _query_ranges(query_ranges)
        flat = [(row, *pair) for row, pairs in enumerate(rows) for pair in pairs]
        table = torch.tensor(flat, dtype=torch.int64).reshape(-1, 3)
        facts = StructureFacts(documents=len(rows), spans=True)
        self._freeze(full=rows, query_ranges=ranges, table=table, facts=facts)

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        batch, queries, keys = q_shape[0], q_shape[1], k_shape[1]
        if len(self.full) != batch:
            raise ValueError(f"full: spans are given for {len(self.full)} samples, but q has batch {batch}")
        check_spans(self.full, (keys,) * batch)
        if self.query_ranges is None:
            return
        if self.query_ranges[-1].local_end != queries:
            raise ValueError(
                f"query_ranges: they must cover the full local query, 0 to {queries}, but end at {self.query_ranges[-1].local_end}"
            )
        for part in self.query_ranges:
            end = part.global_start + part.local_end - part.local_start
            if end > keys:
                raise ValueError(f"query_ranges: {tuple(part)} reaches global position {end}, but there are {keys} keys")

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> SpansMeta:
        return SpansMeta(self.full, self.query_ranges, device)

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.table,)

    def __repr__(self) -> str:
        return f"Spans({[list(row) for row in self.full]}, query_ranges={self.query_ranges})"


@dataclass(frozen=True)
class SpansMeta:
    """Spans for one device: host segments for kernels that run piecewise, a visible-end table for those that mask."""

    full: Pairs
    query_ranges: tuple[QueryRange, ...] | None
    device: torch.device
    _ends: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _segments: dict[tuple[int, int, int], tuple[Segment, ...]] = field(default_factory=dict)

    def segments(self, row: int, queries: int, keys: int) -> tuple[Segment, ...]:
        """The segments of one sample, in order, covering its queries once."""
        key = (row, queries, keys)
        if key not in self._segments:
            self._segments[key] = segments_of(self.full[row], self.query_ranges, queries, keys)
        return self._segments[key]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Samples that share one set of spans, so that they can run as one batch."""
        by_spans: dict[tuple[tuple[int, int], ...], list[int]] = {}
        for row, pairs in enumerate(self.full):
            by_spans.setdefault(pairs, []).append(row)
        return tuple(tuple(rows) for rows in by_spans.values())

    def visible_end(self, queries: int, keys: int) -> torch.Tensor:
        """[B,Sq] int32 on the device: query i of row b sees keys [0, visible_end[b,i])."""
        if (queries, keys) not in self._ends:
            ends = torch.zeros(len(self.full), queries, dtype=torch.int32)
            for row in range(len(self.full)):
                for part in self.segments(row, queries, keys):
                    if part.causal:
                        ends[row, part.start : part.end] = torch.arange(
                            part.kv_end - (part.end - part.start) + 1, part.kv_end + 1, dtype=torch.int32
                        ).clamp_(min=0)
                    else:
                        ends[row, part.start : part.end] = part.kv_end
            self._ends[(queries, keys)] = ends.to(self.device)
        return self._ends[(queries, keys)]


def segments_of(
    spans: tuple[tuple[int, int], ...], ranges: tuple[QueryRange, ...] | None, queries: int, keys: int
) -> tuple[Segment, ...]:
    """Cut local query rows into pieces that are wholly inside one span or wholly outside all of them."""
    if queries == 0:
        return ()
    segments: list[Segment] = []
    for part in ranges or (QueryRange(0, queries, keys - queries),):
        shift = part.local_start - part.global_start
        position, stop = part.global_start, part.global_start + part.local_end - part.local_start
        for start, end in spans:
            if end <= position or start >= stop:
                continue
            if position < start:
                segments.append(Segment(position + shift, start + shift, start, True))
                position = start
            last = min(end, stop)
            segments.append(Segment(position + shift, last + shift, end, False))
            position = last
        if position < stop:
            segments.append(Segment(position + shift, stop + shift, stop, True))
    return tuple(segments)


def check_spans(rows: Pairs, keys: tuple[int, ...]) -> None:
    """Every span inside its row's keys; one entry a row."""
    if len(rows) != len(keys):
        raise ValueError(f"spans: given for {len(rows)} rows, but there are {len(keys)}")
    for row, (pairs, limit) in enumerate(zip(rows, keys, strict=True)):
        if pairs and pairs[-1][1] > limit:
            raise ValueError(f"spans[{row}]: [{pairs[-1][0]}, {pairs[-1][1]}) ends past the row's {limit} keys")


def _query_ranges(ranges: Any) -> tuple[QueryRange, ...]:
    parts: list[QueryRange] = []
    for given in ranges:
        numbers = host_integers("query_ranges", given)
        if len(numbers) != 3:
            raise ValueError(f"query_ranges: (local_start, local_end, global_start) is needed, got {tuple(numbers)}")
        part = QueryRange(*numbers)
        expected = parts[-1].local_end if parts else 0
        if part.local_start != expected or part.local_end <= part.local_start or part.global_start < 0:
            raise ValueError(
                f"query_ranges: ranges must cover local rows contiguously from 0; expected one from {expected}, got {tuple(part)}"
            )
        parts.append(part)
    if not parts:
        raise ValueError("query_ranges: at least one range is needed (leave it out for the last Sq positions)")
    return tuple(parts)
