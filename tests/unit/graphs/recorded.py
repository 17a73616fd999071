"""Device graphs played on the CPU: operators are recorded, not computed, and done again at the same addresses."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """As a device does it: what is captured leaves no result until the replay (NaN here), and writes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def capture_begin(self, pool: Any, **how: Any) -> None:
        assert pool == "the pool"
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

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
        if "empty" not in operator._schema.name:  # memory alone: a replay does not touch it
            self._steps.append((operator, args, kwargs, out))
        return out


class CpuGraphs:
    """Stands in for `GraphDevice`."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.new = device, RecordedGraph

    def pool(self) -> str:
        return "the pool"

    def stream(self) -> Any:
        return torch.no_grad()

    def settle(self) -> None:
        """The CPU is done when a call returns."""

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
