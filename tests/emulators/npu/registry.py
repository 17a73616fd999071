"""Ops of an emulated extension: schemas defined, calls checked, recorded and answered from CPU tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tests.emulators.npu import device


class Call(NamedTuple):
    """One call of a native op: its name and every argument that was passed, by the schema's name."""

    op: str
    arguments: dict[str, Any]


#: Every call of an emulated op, in order.
calls: list[Call] = []
_libraries: dict[str, torch.library.Library] = {}


def define(namespace: str, name: str, schema: str, answer: Callable[..., Any] | None) -> None:
    """Adds `namespace::name`; without an answer, calling it is NotImplementedError."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    library = _libraries[namespace]
    library.define(name + schema)
    op = getattr(getattr(torch.ops, namespace), name)
    library.impl(name, _kernel(op.default, f"{namespace}::{name}", answer), "PrivateUse1")
    setattr(getattr(torch.ops, namespace), name, Exact(op))


class Exact:
    """A torch.ops entry that takes no tensor in the place of a number: torch would read it on the host."""

    def __init__(self, op: Any) -> None:
        self._op = op
        self._numbers = {a.name: str(a.type) for a in op.default._schema.arguments if "Tensor" not in str(a.type)}
        self._order = [a.name for a in op.default._schema.arguments]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._op, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, value in (dict(zip(self._order, args, strict=False)) | kwargs).items():
            found = [type(v).__name__ for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor)]
            if name in self._numbers and found:
                raise RuntimeError(
                    f"{self._op}() Expected a value of type '{self._numbers[name]}' for argument '{name}' but instead "
                    f"found type '{found[0]}'."
                )
        return self._op(*args, **kwargs)


def _kernel(op: Any, name: str, answer: Callable[..., Any] | None) -> Callable[..., Any]:
    order = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if answer is None:
            raise NotImplementedError(f"(emulator) {name} is not emulated")
        calls.append(Call(name, dict(zip(order, args, strict=False)) | kwargs))
        device.same_device(name, (args, kwargs))
        low_args, low_kwargs = tree_map(device.lower, (args, kwargs))
        inputs = [t for t in tree_flatten((low_args, low_kwargs))[0] if isinstance(t, torch.Tensor)]
        versions = [t._version for t in inputs]
        out = tree_map(device.lift, answer(*low_args, **low_kwargs))
        if [t._version for t in inputs] != versions:
            raise AssertionError(f"(emulator) {name} modified an input")
        return out

    return kernel
