"""Reads lengths, boundaries and tables given as lists, numpy arrays or CPU tensors: once, when a structure is built."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import torch

INT32_LIMIT = 2**31 - 1


def on_host(data: Any) -> bool:
    """Whether `data` can be read without touching a device."""
    return not isinstance(data, torch.Tensor) or (data.device.type == "cpu" and type(data).__name__ != "FakeTensor")


def integer_tensor(name: str, data: torch.Tensor, rank: int) -> torch.Tensor:
    """`data` itself if it is an integer tensor of that rank; TypeError or ValueError naming it otherwise."""
    if data.dtype.is_floating_point or data.dtype.is_complex or data.dtype == torch.bool:
        raise TypeError(f"{name}: integers are needed, got dtype {_dtype(data)}")
    if data.dim() != rank:
        shape = "[documents + 1]" if rank == 1 else "[batch, max_pages]"
        raise ValueError(f"{name}: rank {rank} is needed ({shape}), got shape {list(data.shape)}")
    return data


def host_integers(name: str, data: Any, rank: int = 1) -> Any:
    """Nested tuples of Python ints; floats and bools are refused by name."""
    if not isinstance(data, torch.Tensor):
        if isinstance(data, (str, bytes)) or not isinstance(data, Iterable):
            raise TypeError(f"{name}: a sequence of integers is needed, got {type(data).__name__} {data!r}")
        data = _as_tensor(name, list(data) if not hasattr(data, "dtype") else data, rank)
    integer_tensor(name, data, rank)
    values = data.tolist()
    return tuple(tuple(row) for row in values) if rank == 2 else tuple(values)


def _as_tensor(name: str, data: Any, rank: int) -> torch.Tensor:
    if isinstance(data, list):
        if not data:
            return torch.empty((0,) * rank, dtype=torch.int64)
        items = [item for row in data for item in row] if rank == 2 else data
        for item in items:
            if isinstance(item, bool) or not hasattr(item, "__index__"):
                raise TypeError(f"{name}: integers are needed, got {type(item).__name__} {item!r}")
    try:
        return torch.as_tensor(data)
    except (ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"{name}: not a rectangular table of 64-bit integers: {error}") from error


def lengths_of(name: str, data: Any) -> tuple[int, ...]:
    """Host lengths, none negative, their sum within int32."""
    lengths: tuple[int, ...] = host_integers(name, data)
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"{name}: lengths cannot be negative, got {length} at {index}")
    if sum(lengths) > INT32_LIMIT:
        raise ValueError(f"{name}: {sum(lengths)} rows in all exceed the int32 limit {INT32_LIMIT}")
    return lengths


def lengths_from_boundaries(name: str, data: Any) -> tuple[int, ...]:
    """Document lengths from cumulative boundaries: start at 0, non-decreasing, within int32."""
    bounds: tuple[int, ...] = host_integers(name, data)
    if not bounds:
        raise ValueError(f"{name}: at least the leading 0 is needed, got an empty sequence")
    if bounds[0] != 0:
        raise ValueError(f"{name}: boundaries start at 0, got {bounds[0]}")
    for index, (before, after) in enumerate(zip(bounds, bounds[1:], strict=False)):
        if after > INT32_LIMIT:
            raise ValueError(f"{name}: {after} at {index + 1} exceeds the int32 limit {INT32_LIMIT}")
        if after < before:
            raise ValueError(f"{name}: boundaries must be non-decreasing, got {before} then {after} at {index + 1}")
    return tuple(after - before for before, after in zip(bounds, bounds[1:], strict=False))


def boundaries(lengths: Iterable[int]) -> torch.Tensor:
    """int32 cumulative boundaries on the CPU, from 0."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def pairs_of(name: str, rows: Any) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Per row, sorted and disjoint half-open (start, end) pairs."""
    if isinstance(rows, torch.Tensor) and not on_host(rows):
        raise TypeError(f"{name}: spans are host data, got a tensor on {rows.device}")
    table = rows.tolist() if hasattr(rows, "tolist") else rows
    if isinstance(table, (str, bytes)) or not isinstance(table, Iterable):
        raise TypeError(f"{name}: one sequence of (start, end) pairs per row is needed, got {type(rows).__name__}")
    return tuple(_row_of_pairs(f"{name}[{index}]", row) for index, row in enumerate(table))


def _row_of_pairs(name: str, row: Any) -> tuple[tuple[int, int], ...]:
    pairs: list[tuple[int, int]] = []
    if isinstance(row, (str, bytes)) or not isinstance(row, Iterable):
        raise TypeError(f"{name}: a sequence of (start, end) pairs is needed, got {row!r}; wrap each row in a list")
    for pair in row:
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Iterable):
            raise TypeError(f"{name}: (start, end) pairs are needed, got {pair!r}; give one list of pairs per row")
        ends = host_integers(name, pair)
        if len(ends) != 2:
            raise ValueError(f"{name}: (start, end) pairs are needed, got {tuple(ends)}")
        start, end = ends
        if start < 0 or end <= start:
            raise ValueError(f"{name}: [start, end) needs 0 <= start < end, got [{start}, {end})")
        if pairs and start < pairs[-1][1]:
            raise ValueError(f"{name}: spans must be sorted and disjoint, got {pairs[-1]} before ({start}, {end})")
        pairs.append((start, end))
    return tuple(pairs)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
