"""Capacity: the most documents and rows that a Packed made for graph replay can ever hold."""

from __future__ import annotations

from typing import Any, NamedTuple

from polyattn.structures.host_data import integer, integer_row

Lengths = tuple[int, ...]


class Capacity(NamedTuple):
    """At most `documents` documents, of at most `max_q` query and `max_k` key rows each."""

    documents: int
    max_q: int
    max_k: int


def capacity_of(given: Any) -> Capacity:
    """From (documents, max_q) or (documents, max_q, max_k)."""
    limits = integer_row("capacity", given, "(documents, max_q[, max_k])")
    if len(limits) not in (2, 3):
        raise ValueError(f"capacity: (documents, max_q) or (documents, max_q, max_k) is needed, got {limits}")
    for limit in limits:
        integer("capacity", limit)
    return Capacity(limits[0], limits[1], limits[-1])


def fitted(lengths_q: Lengths, lengths_k: Lengths, capacity: Capacity) -> tuple[Lengths, Lengths]:
    """The lengths filled up with empty documents; ValueError where they exceed the capacity."""
    for name, lengths, longest in (("q", lengths_q, capacity.max_q), ("k", lengths_k, capacity.max_k)):
        if len(lengths) > capacity.documents or max(lengths, default=0) > longest:
            raise ValueError(
                f"{name}: {len(lengths)} documents of at most {max(lengths, default=0)} rows exceed the capacity of "
                f"{capacity.documents} documents of {longest} rows"
            )
    empty = (0,) * (capacity.documents - len(lengths_q))
    return lengths_q + empty, lengths_k + empty
