"""Ops of an emulated extension: schemas defined, calls checked, recorded and answered from CPU tensors."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from tests.emulators.npu import device
from tests.emulators.npu.calls import Call, came_through, lint_of_caller, recorded
from tests.emulators.npu.dtypes import numbered

#: The latest calls of emulated ops, in order; `calls.recording` keeps all of a scope.
calls: deque[Call] = deque(maxlen=16)
#: Op -> how often it was called.
counts: Counter[str] = Counter()
_libraries: dict[str, torch.library.Library] = {}


def define(
    namespace: str,
    name: str,
    schema: str,
    answer: Callable[..., Any] | None,
    *,
    fake: Callable[..., Any] | None = None,
    host: Collection[str] = (),
) -> None:
    """Adds `namespace::name`, or an overload "name.out"; without an answer, calling it is NotImplementedError.

    `fake` gives the results' shapes without data; `host` names the tensors that the op takes on the CPU.
    """
    own = library(namespace)
    own.define(name + schema)
    base, _, overload = name.partition(".")
    packet = getattr(getattr(torch.ops, namespace), base)
    packet = packet.packet if isinstance(packet, Exact) else packet
    op = getattr(packet, overload or "default")
    own.impl(name, _kernel(op, f"{namespace}::{name}", answer, host), "PrivateUse1")
    if fake is not None:
        torch.library.register_fake(f"{namespace}::{name}", fake, lib=own)
    setattr(getattr(torch.ops, namespace), base, Exact(packet))


def library(namespace: str) -> torch.library.Library:
    """The emulator's registrations in a namespace, which end with the process."""
    if namespace not in _libraries:
        _libraries[namespace] = torch.library.Library(namespace, "FRAGMENT")
    return _libraries[namespace]


class Exact:
    """A torch.ops entry that takes no tensor in the place of a number: torch would read it on the host.

    Its overloads are taken as they are. A dtype in the place of its number is allowed, as torch_npu allows it.
    """

    def __init__(self, packet: Any) -> None:
        self.packet = packet
        arguments = packet.default._schema.arguments
        self._numbers = {a.name: str(a.type) for a in arguments if "Tensor" not in str(a.type)}
        self._order = [a.name for a in arguments]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.packet, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, value in (dict(zip(self._order, args, strict=False)) | kwargs).items():
            found = [type(v).__name__ for v in tree_flatten(value)[0] if isinstance(v, torch.Tensor)]
            if name in self._numbers and found:
                raise RuntimeError(
                    f"{self.packet}() Expected a value of type '{self._numbers[name]}' for argument '{name}' but "
                    f"instead found type '{found[0]}'."
                )
        return self.packet(*args, **{name: self._number(name, value) for name, value in kwargs.items()})

    def _number(self, name: str, value: Any) -> Any:
        return numbered(value) if isinstance(value, torch.dtype) and "int" in self._numbers.get(name, "") else value


def _kernel(op: Any, name: str, answer: Callable[..., Any] | None, host: Collection[str]) -> Callable[..., Any]:
    order = [argument.name for argument in op._schema.arguments]
    outputs = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    known = {argument.name: argument.default_value for argument in op._schema.arguments}

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if answer is None:
            raise NotImplementedError(f"(emulator) {name} is not emulated")
        given = dict(zip(order, args, strict=False)) | kwargs
        call = Call(name, given, known, came_through())
        calls.append(call)
        counts[name] += 1
        recorded(call)
        lint_of_caller()
        device.same_device(name, [value for argument, value in given.items() if argument not in host])
        for argument in host:
            if isinstance(given.get(argument), device.NpuTensor):
                raise RuntimeError(f"{name}: {argument} must be on the CPU, is on npu:0")
        low = tree_map(device.lower, given)
        inputs = [t for n, v in low.items() if n not in outputs for t in tree_flatten(v)[0] if torch.is_tensor(t)]
        before = [_bits(t) for t in inputs]
        out = answer(**low)
        if isinstance(out, tuple):  # an older release's schema has fewer results
            out = out[: len(op._schema.returns)]
        if not all(torch.equal(_bits(t), bits) for t, bits in zip(inputs, before, strict=True)):
            raise AssertionError(f"(emulator) {name} modified an input")
        return tuple(given[n] for n in outputs) if outputs else tree_map(device.lift, out)

    return kernel


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of the content. Below autograd, where an op's kernel runs, no version counts what is written."""
    return tensor.clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
