"""Spans: causal attention in which a query inside a full span sees every key before the span's end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Meta, Structure, keep
from polyattn.structures.host_data import integer_row, on_host
from polyattn.structures.intervals import Intervals, check_ends, intervals_of, rows_of, table_of
from polyattn.structures.lasting import lasting
from polyattn.structures.transfer import send

#: Shapes of one padded or sharded batch; the oldest are dropped.
_SHAPES_LIMIT = 32


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

    The queries are the last Sq of Sk positions unless `query_ranges` ((local_start, local_end, global_start),
    contiguous from 0) says otherwise. Samples may differ.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 8, 2, 8)
    >>> pa.attention(q, q, q, structure=pa.Spans([[(2, 5)]])).shape
    torch.Size([1, 8, 2, 8])
    """

    kind: ClassVar[str] = "spans"
    full: tuple[Intervals, ...]
    query_ranges: tuple[QueryRange, ...] | None
    table: torch.Tensor
    places: torch.Tensor | None

    @lasting
    def __init__(self, full: Any, query_ranges: Any = None) -> None:
        rows = intervals_of("full", full)
        ranges = None if query_ranges is None else _query_ranges(query_ranges)
        table = table_of(rows)
        assert table is not None
        places = None if ranges is None else torch.tensor(ranges, dtype=torch.int64, device="cpu")
        facts = StructureFacts(documents=len(rows), spans=True)
        self._freeze(full=rows, query_ranges=ranges, table=table, places=places, facts=facts)

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        batch, queries, keys = q_shape[0], q_shape[1], k_shape[1]
        check_ends("full", self.full, (keys,) * batch)
        if self.query_ranges is None:
            return
        if self.query_ranges[-1].local_end != queries:
            raise ValueError(
                f"query_ranges: they must cover the full local query, 0 to {queries}, "
                f"but end at {self.query_ranges[-1].local_end}"
            )
        for part in self.query_ranges:
            end = part.global_start + part.local_end - part.local_start
            if end > keys:
                raise ValueError(
                    f"query_ranges: {tuple(part)} reaches global position {end}, but there are {keys} keys"
                )

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> SpansMeta:
        return SpansMeta(self.full, self.query_ranges, device)

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.table,) if self.places is None else (self.table, self.places)

    def anchor_ints(self) -> tuple[int, ...]:
        return (len(self.full),)

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Spans:
        return cls(rows_of(tensors[0], ints[0]), tensors[1].tolist() if len(tensors) == 2 else None)

    def __repr__(self) -> str:
        return f"Spans({[list(row) for row in self.full]}, query_ranges={self.query_ranges})"


@dataclass(frozen=True, eq=False)
class SpansMeta(Meta):
    """Spans for one device: host segments for kernels that run piecewise, a visible-end table for those that mask."""

    full: tuple[Intervals, ...]
    query_ranges: tuple[QueryRange, ...] | None
    device: torch.device
    _ends: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _segments: dict[tuple[int, int], tuple[tuple[Segment, ...], ...]] = field(default_factory=dict)

    def segments(self, row: int, queries: int, keys: int) -> tuple[Segment, ...]:
        """The segments of one sample, in order, covering its queries once."""
        segments = self._segments.get((queries, keys))
        if segments is None:
            segments = tuple(segments_of(spans, self.query_ranges, queries, keys) for spans in self.full)
            keep(self._segments, _SHAPES_LIMIT, (queries, keys), segments)
        return segments[row]

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Samples that share one set of spans, so that they can run as one batch."""
        by_spans: dict[Intervals, list[int]] = {}
        for row, spans in enumerate(self.full):
            by_spans.setdefault(spans, []).append(row)
        return tuple(tuple(rows) for rows in by_spans.values())

    @lasting
    def visible_end(self, queries: int, keys: int) -> torch.Tensor:
        """[B,Sq] int32 on the device: query i of row b sees keys [0, visible_end[b,i])."""
        ends = self._ends.get((queries, keys))
        if ends is None:
            rows = [_visible_end(self.segments(row, queries, keys), queries) for row in range(len(self.full))]
            table = torch.stack(rows) if rows else torch.empty(0, queries, dtype=torch.int32, device="cpu")
            ends = send(table, self.device)
            keep(self._ends, _SHAPES_LIMIT, (queries, keys), ends)
        return ends


def _visible_end(segments: tuple[Segment, ...], queries: int) -> torch.Tensor:
    ends = torch.zeros(queries, dtype=torch.int32, device="cpu")
    for start, end, kv_end, causal in segments:
        diagonal = kv_end - (end - start)
        ends[start:end] = torch.arange(diagonal + 1, kv_end + 1, device="cpu").clamp_(min=0) if causal else kv_end
    return ends


def segments_of(
    spans: Intervals, ranges: tuple[QueryRange, ...] | None, queries: int, keys: int
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


def _query_ranges(ranges: Any) -> tuple[QueryRange, ...]:
    if isinstance(ranges, torch.Tensor) and not on_host(ranges):
        raise TypeError(f"query_ranges: ranges are host data, got a tensor on {ranges.device}")
    if isinstance(ranges, (str, bytes, dict)) or not isinstance(ranges, Iterable):
        raise TypeError(
            f"query_ranges: a list of (local_start, local_end, global_start) is needed, got {type(ranges).__name__}"
        )
    parts: list[QueryRange] = []
    for given in ranges:
        numbers = integer_row("query_ranges", given, "(local_start, local_end, global_start)")
        if len(numbers) != 3:
            raise ValueError(f"query_ranges: (local_start, local_end, global_start) is needed, got {tuple(numbers)}")
        part = QueryRange(*numbers)
        expected = parts[-1].local_end if parts else 0
        if part.local_start != expected or part.local_end <= part.local_start or part.global_start < 0:
            raise ValueError(
                f"query_ranges: ranges must cover local rows contiguously from 0; expected one from {expected}, "
                f"got {tuple(part)}"
            )
        parts.append(part)
    if not parts:
        raise ValueError("query_ranges: at least one range is needed (leave it out for the last Sq positions)")
    return tuple(parts)
