"""Counts what a call makes its rank do: exchanges, agreements, and the bytes that it allocates beside slots."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from polyattn.distributed import agreement, gathering
from polyattn.distributed.local import LocalCall

_EXCHANGES = (
    "all_to_all_single", "all_to_all", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "broadcast", "broadcast_object_list", "barrier", "reduce_scatter_tensor", "gather", "scatter", "send", "recv",
    "batch_isend_irecv",
)  # fmt: skip


@contextmanager
def exchanges() -> Iterator[Counter[str]]:
    """Counts every function of torch.distributed that communicates, and agreements that go through the store."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    places = [(dist, name, name) for name in _EXCHANGES]
    places += [(gathering, "_all_gather", "all_gather"), (agreement._Book, "_ask", "agreement")]  # type: ignore[list-item]
    kept = [(owner, name, getattr(owner, name)) for owner, name, _ in places]
    try:
        for owner, name, told in places:
            setattr(owner, name, counted(told, getattr(owner, name)))
        yield counts
    finally:
        for owner, name, function in kept:
            setattr(owner, name, function)


class Allocations(TorchDispatchMode):
    """The most bytes that tensors made inside hold at a time; what slots allocate is theirs, and not counted."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._held = 0
        self._users: Counter[int] = Counter()
        self._slots = 0

    def __enter__(self) -> Any:
        run = self._run = LocalCall.run

        def unseen(call: LocalCall, *args: Any) -> Any:
            self._slots += 1
            try:
                return run(call, *args)
            finally:
                self._slots -= 1

        LocalCall.run = unseen  # type: ignore[method-assign]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        LocalCall.run = self._run  # type: ignore[method-assign]
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {_storage(value) for value in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        if not self._slots:
            for tensor in _tensors(result):
                self._seen(tensor, given)
        return result

    def _seen(self, tensor: torch.Tensor, given: set[int]) -> None:
        storage = _storage(tensor)
        if storage in given and not self._users[storage]:
            return  # a view of what was there before
        size = tensor.untyped_storage().nbytes()
        if not self._users[storage]:
            self._held += size
            self.peak = max(self.peak, self._held)
        self._users[storage] += 1
        weakref.finalize(tensor, self._gone, storage, size)

    def _gone(self, storage: int, size: int) -> None:
        self._users[storage] -= 1
        if not self._users[storage]:
            self._held -= size


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)
