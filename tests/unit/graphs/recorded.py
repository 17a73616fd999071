"""Device graphs played on the CPU: operators are recorded, not computed, and done again at the same addresses."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from polyattn.graphs.device import GraphDevice


class RecordedGraph(TorchDispatchMode):
    """As a device does it: what is captured leaves no result until the replay (NaN here), and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._memory: list[torch.Tensor] = []
        self._open = False

    def capture_begin(self, pool: Any, capture_error_mode: str = "global") -> None:
        assert (pool, capture_error_mode) == ("the pool", "thread_local")
        self.__enter__()
        self._open = True

    def capture_end(self) -> None:
        if not self._open:
            raise RuntimeError("no capture is under way")
        self._open = False
        self.__exit__(None, None, None)
        if not self._steps:
            warnings.warn("The CUDA Graph is empty. This usually means that the graph was ...", stacklevel=2)

    def replay(self) -> None:
        for operator, args, kwargs, recorded in self._steps:
            for kept, made in zip(_tensors(recorded), _tensors(operator(*args, **kwargs)), strict=True):
                if kept.data_ptr() != made.data_ptr():
                    kept.copy_(made)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        before = [tensor.clone() for tensor in given] if operator._schema.is_mutable else []
        out = operator(*args, **kwargs)
        for tensor, kept in zip(given, before, strict=False):
            tensor.copy_(kept)
        held = {tensor.untyped_storage().data_ptr() for tensor in given}
        for tensor in _tensors(out):
            if tensor.untyped_storage().data_ptr() not in held and tensor.is_floating_point():
                tensor.fill_(float("nan"))
        if "empty" in operator._schema.name:  # memory alone: a replay does not touch it, and the pool keeps it
            self._memory.append(out)
        else:
            self._steps.append((operator, args, kwargs, out))
        return out


class CpuGraphs(GraphDevice):
    """A CPU that has graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device, self._new, self._how = device, RecordedGraph, {"capture_error_mode": "thread_local"}

    def pool(self) -> str:
        return "the pool"

    def stream(self) -> Any:
        return nullcontext()

    def settle(self) -> None:
        """The CPU is done when a call returns."""

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        with _disable_current_modes():  # an address: no work of the graph
            return super().unowned(tensor)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
