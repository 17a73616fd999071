"""Operators of others inside compiled graphs, which hold the host tensors within the device's.

A graph calls `toychip::carried` in the place of such an operator; it puts the device's tensors back and makes the call.
A runtime in C++ needs nothing of the kind.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch._library.simple_registry import singleton

_kept: list[torch.library.Library] = []
#: Operator -> its kernel for any device, for the dispatcher does not give it away.
_kernels: dict[str, Callable[..., Any]] = {}


def define() -> None:
    """Defines the operator, once a process, and from now on remembers the kernels of others."""
    torch.library.Library.impl = _remembered(torch.library.Library.impl)  # type: ignore[method-assign]
    library = torch.library.Library("toychip", "DEF")
    library.define("carried(str op, str arguments, Tensor[] tensors) -> Tensor[]")
    library.impl("carried", _carried, "CompositeExplicitAutograd")
    torch.library.register_fake("toychip::carried", _shapes, lib=library)
    _kept.append(library)


def _remembered(impl: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(library: Any, op: Any, kernel: Any, dispatch_key: str = "", **named: Any) -> Any:
        if dispatch_key == "CompositeExplicitAutograd" and isinstance(op, str):
            _kernels[f"{library.ns}::{op}"] = kernel
        return impl(library, op, kernel, dispatch_key, **named)

    return remembered


def carries(func: Any) -> bool:
    """Whether `carry` has what it needs."""
    return func.name() in _kernels


def carry(func: Any, args: Any) -> Any:
    """`func(*args)`: at once, or, where a graph is traced, by way of the operator."""
    from toychip_runtime import device

    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if all(type(device.lower(tensor)) is torch.Tensor for tensor in tensors):
        return _called(func.name(), args)
    said = json.dumps([{"ours": isinstance(a, device.ToyTensor)} if isinstance(a, torch.Tensor) else a for a in args])
    out = torch.ops.toychip.carried(func.name(), said, [device.lower(tensor) for tensor in tensors])
    lifted = [device.lift(tensor) for tensor in out]
    return lifted[0] if len(func._schema.returns) == 1 else tuple(lifted)


def _called(op: str, args: Any) -> Any:
    """The kernel's answer. A backward differentiates inside, but below a wrapper's dispatch autograd is shut out."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradOther", "AutogradCPU", "AutogradPrivateUse1", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        return _kernels[op](*args)


def _carried(op: str, arguments: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    from toychip_runtime import device

    out = _called(op, _filled(arguments, tensors))
    return [device.lower(tensor).clone() for tensor in (out if isinstance(out, tuple | list) else (out,))]


def _shapes(op: str, arguments: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    kernel = singleton.find(op).fake_impl.kernel
    out = kernel(*_filled(arguments, tensors))
    made = out if isinstance(out, tuple | list) else (out,)
    return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu") for t in made]


def _filled(arguments: str, tensors: list[torch.Tensor]) -> list[Any]:
    """The arguments as they were, with the tensors in their places."""
    from toychip_runtime import device

    rest = iter(tensors)
    filled = []
    for value in json.loads(arguments):
        if isinstance(value, dict):
            value = device.ToyTensor(next(rest)) if value["ours"] else next(rest)
        filled.append(value)
    return filled
