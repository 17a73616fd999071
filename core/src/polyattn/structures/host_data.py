"""Reads lengths, boundaries and tables given as lists, numpy arrays or CPU tensors: once, when a structure is built."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import index, sub
from typing import Any

import torch

from polyattn.structures.lasting import lasting

INT32_LIMIT = 2**31 - 1


def on_host(data: Any) -> bool:
    """Whether `data` can be read without touching a device; nothing can while it is traced or fake."""
    if not isinstance(data, torch.Tensor):
        return True
    return data.device.type == "cpu" and not torch.compiler.is_compiling() and type(data).__name__ != "FakeTensor"


def integer_tensor(name: str, data: torch.Tensor, rank: int, shape: str) -> torch.Tensor:
    """`data` itself if it is an integer tensor of that rank; TypeError or ValueError naming it otherwise."""
    if data.dtype.is_floating_point or data.dtype.is_complex or data.dtype == torch.bool:
        raise TypeError(f"{name}: integers are needed, got dtype {dtype_name(data.dtype)}")
    if data.dim() != rank:
        raise ValueError(f"{name}: shape {shape} is needed, got {list(data.shape)}")
    return data


def integer(name: str, value: Any, least: int = 0) -> int:
    """One Python int of at least `least`; floats and bools are refused."""
    number = value if type(value) is int else _index(name, value)
    if number < least:
        raise ValueError(f"{name}: at least {least} is needed, got {number}")
    return number


def integer_row(name: str, data: Any, shape: str) -> tuple[int, ...]:
    """A flat sequence of Python ints; floats, bools and other ranks are refused by name."""
    if isinstance(data, torch.Tensor):
        return tuple(integer_tensor(name, data, 1, shape).tolist())
    items = _items(name, data, 1, shape)
    if set(map(type, items)) <= {int}:
        return tuple(items)
    return tuple(_index(name, item, shape) for item in items)


def integer_table(name: str, data: Any, shape: str) -> tuple[tuple[int, ...], ...]:
    """A rectangular table of Python ints; floats, bools and other ranks are refused by name."""
    if isinstance(data, torch.Tensor):
        return tuple(map(tuple, integer_tensor(name, data, 2, shape).tolist()))
    rows = _items(name, data, 2, shape)
    for row in rows:
        if not isinstance(row, Iterable):
            raise ValueError(f"{name}: shape {shape} is needed, got a flat sequence of {type(row).__name__}")
    table = tuple(integer_row(f"{name}[{place}]", row, shape) for place, row in enumerate(rows))
    widths = sorted({len(row) for row in table})
    if len(widths) > 1:
        raise ValueError(f"{name}: shape {shape} is needed, got rows of {widths[0]} to {widths[-1]} entries")
    return table


def _items(name: str, data: Any, rank: int, shape: str) -> list[Any]:
    if isinstance(data, (str, bytes, dict, set, frozenset)) or not isinstance(data, Iterable):
        raise TypeError(f"{name}: a sequence of integers {shape} is needed, got {type(data).__name__} {data!r}")
    kind = getattr(getattr(data, "dtype", None), "kind", None)
    if kind is None:
        return list(data)
    array: Any = data
    if kind not in "iuO":
        raise TypeError(f"{name}: integers are needed, got dtype {array.dtype}")
    if array.ndim != rank:
        raise ValueError(f"{name}: shape {shape} is needed, got {list(array.shape)}")
    return list(array.tolist())


def _index(name: str, item: Any, shape: str = "") -> int:
    if isinstance(item, torch.Tensor):
        if not on_host(item):
            raise TypeError(f"{name}: integers on the host are needed, got a tensor on {item.device}")
        return int(integer_tensor(name, item, 0, "[]").item())
    if shape and isinstance(item, (list, tuple)):
        raise ValueError(f"{name}: shape {shape} is needed, got {type(item).__name__} {item!r} inside it")
    try:
        if isinstance(item, bool):
            raise TypeError
        return index(item)
    except TypeError:
        raise TypeError(f"{name}: integers are needed, got {type(item).__name__} {item!r}") from None


def lengths_of(name: str, data: Any, shape: str = "[documents]") -> tuple[int, ...]:
    """Host lengths, none negative, their sum within int32."""
    lengths = integer_row(name, data, shape)
    if min(lengths, default=0) < 0:
        raise ValueError(f"{name}: lengths cannot be negative, got {min(lengths)} at {lengths.index(min(lengths))}")
    if sum(lengths) > INT32_LIMIT:
        raise ValueError(f"{name}: {sum(lengths)} rows in all exceed the int32 limit {INT32_LIMIT}")
    return lengths


def lengths_from_boundaries(name: str, data: Any) -> tuple[int, ...]:
    """Document lengths from cumulative boundaries: start at 0, non-decreasing, within int32."""
    bounds = integer_row(name, data, "[documents + 1]")
    if not bounds:
        raise ValueError(f"{name}: at least the leading 0 is needed, got an empty sequence")
    if bounds[0] != 0:
        raise ValueError(f"{name}: boundaries start at 0, got {bounds[0]}")
    lengths = tuple(map(sub, bounds[1:], bounds))
    if max(bounds) > INT32_LIMIT:
        raise ValueError(f"{name}: {max(bounds)} at {bounds.index(max(bounds))} exceeds the int32 limit {INT32_LIMIT}")
    if min(lengths, default=0) < 0:
        place = next(place for place, length in enumerate(lengths) if length < 0)
        raise ValueError(
            f"{name}: boundaries must be non-decreasing, got {bounds[place]} then {bounds[place + 1]} at {place + 1}"
        )
    return lengths


def lengths_from_positions(name: str, data: Any) -> tuple[int, ...]:
    """Document lengths from position ids [T] or [1,T]: one starts where an id is not its predecessor plus one."""
    shape = getattr(data, "shape", None)
    if shape is not None and len(shape) == 2 and shape[0] == 1:
        data = data[0]
    ids = integer_row(name, data, "[T] or [1, T]")
    if min(ids, default=0) < 0:
        raise ValueError(f"{name}: ids cannot be negative, got {min(ids)}")
    starts = [place for place in range(len(ids)) if place == 0 or ids[place] != ids[place - 1] + 1]
    return tuple(map(sub, [*starts[1:], len(ids)], starts))


@lasting
def boundaries(lengths: Iterable[int]) -> torch.Tensor:
    """int32 cumulative boundaries on the CPU, from 0."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cpu")


@lasting
def host_tensor(name: str, data: Any) -> torch.Tensor:
    """`data` itself if it is a tensor; a new tensor from nested lists or a numpy array."""
    if isinstance(data, torch.Tensor):
        return data
    if not isinstance(data, (list, tuple)) and not hasattr(data, "__array__"):
        raise TypeError(f"{name}: a tensor, a numpy array or nested lists are needed, got {type(data).__name__}")
    try:
        return torch.tensor(data, device="cpu")
    except (ValueError, TypeError, RuntimeError) as error:
        raise TypeError(f"{name}: not a rectangular array of bools or numbers: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
