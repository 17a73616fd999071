"""Reads half-open [start, end) intervals, one sorted and disjoint list per row; host data."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from polyattn.structures.host_data import integer_row, on_host
from polyattn.structures.lasting import lasting

Intervals = tuple[tuple[int, int], ...]


def intervals_of(name: str, rows: Any) -> tuple[Intervals, ...]:
    """Per row its intervals; TypeError or ValueError naming what is not a non-empty, sorted, disjoint [start, end)."""
    if isinstance(rows, torch.Tensor) and not on_host(rows):
        raise TypeError(f"{name}: intervals are host data, got a tensor on {rows.device}")
    table = rows.tolist() if hasattr(rows, "tolist") else rows
    if isinstance(table, (str, bytes, dict)) or not isinstance(table, Iterable):
        raise TypeError(f"{name}: one list of (start, end) pairs per row is needed, got {type(rows).__name__}")
    return tuple(_row(f"{name}[{place}]", row) for place, row in enumerate(table))


def check_ends(name: str, rows: tuple[Intervals, ...], limits: tuple[int, ...]) -> None:
    """ValueError unless there is one row of intervals per limit, and none ends past it."""
    if len(rows) != len(limits):
        raise ValueError(
            f"{name}: one list of (start, end) pairs per row is needed, got {len(rows)} for {len(limits)} rows"
        )
    for row, (intervals, limit) in enumerate(zip(rows, limits, strict=True)):
        if intervals and intervals[-1][1] > limit:
            start, end = intervals[-1]
            raise ValueError(f"{name}[{row}]: [{start}, {end}) ends past the row's {limit} keys")


@lasting
def table_of(rows: tuple[Intervals, ...] | None) -> torch.Tensor | None:
    """Intervals as a CPU tensor [n,3] of (row, start, end): the form in which a compiled graph carries them."""
    if rows is None:
        return None
    flat = [(row, *pair) for row, pairs in enumerate(rows) for pair in pairs]
    return torch.tensor(flat, dtype=torch.int64, device="cpu").reshape(-1, 3)


def rows_of(table: torch.Tensor, rows: int) -> list[list[tuple[int, int]]]:
    """What `table_of` wrote down, for that many rows."""
    found: list[list[tuple[int, int]]] = [[] for _ in range(rows)]
    for row, start, end in table.tolist():
        found[row].append((start, end))
    return found


def _row(name: str, row: Any) -> Intervals:
    if isinstance(row, (str, bytes, dict)) or not isinstance(row, Iterable):
        raise TypeError(f"{name}: a list of (start, end) pairs is needed, got {row!r}; wrap each row in a list")
    intervals: list[tuple[int, int]] = []
    for pair in row:
        if isinstance(pair, (str, bytes, dict)) or not isinstance(pair, Iterable):
            raise TypeError(f"{name}: (start, end) pairs are needed, got {pair!r}; give one list of pairs per row")
        ends = integer_row(name, pair, "(start, end)")
        if len(ends) != 2:
            raise ValueError(f"{name}: (start, end) pairs are needed, got {ends}")
        start, end = ends
        if start < 0 or end <= start:
            raise ValueError(f"{name}: [start, end) needs 0 <= start < end, got [{start}, {end})")
        if intervals and start < intervals[-1][1]:
            raise ValueError(
                f"{name}: intervals must be sorted and disjoint, got {intervals[-1]} before ({start}, {end})"
            )
        intervals.append((start, end))
    return tuple(intervals)
