"""What was built from a tensor, kept for as long as the tensor lives unmodified, so that all layers share it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")

#: A forward has a handful of masks and boundaries; beyond that the oldest entry is dropped.
_LIMIT = 32


class _Stamp(NamedTuple):
    """A tensor and the state it was in: its version counter, or a copy where it has none (inference mode)."""

    tensor: weakref.ref[torch.Tensor]
    version: int | None
    content: torch.Tensor | None

    def holds(self, tensor: torch.Tensor) -> bool:
        if self.tensor() is not tensor:
            return False
        return self.version == tensor._version if self.content is None else torch.equal(self.content, tensor)


_entries: dict[tuple[Hashable, ...], tuple[tuple[_Stamp, ...], Any]] = {}


def derived(purpose: Hashable, tensors: tuple[torch.Tensor, ...], build: Callable[[], T]) -> T:
    """`build()`, or what it returned before for this purpose and these very tensors, if they have not changed since.

    The value must not hold on to the tensors themselves (`.detach()` them), or it would never be dropped.
    """
    if torch.compiler.is_compiling():  # a graph holds no Python objects between calls
        return build()
    key = (purpose, *map(id, tensors))
    entry = _entries.get(key)
    if entry is not None and all(stamp.holds(tensor) for stamp, tensor in zip(entry[0], tensors, strict=True)):
        value: T = entry[1]
        return value
    value = build()
    stamps = tuple(_stamp(tensor, key) for tensor in tensors)
    if len(_entries) >= _LIMIT:
        _entries.pop(next(iter(_entries), key), None)
    _entries[key] = (stamps, value)
    return value


def _stamp(tensor: torch.Tensor, key: tuple[Hashable, ...]) -> _Stamp:
    reference = weakref.ref(tensor, lambda _: _entries.pop(key, None))
    if tensor.is_inference():
        return _Stamp(reference, None, tensor.clone())
    return _Stamp(reference, tensor._version, None)
