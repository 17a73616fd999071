"""Custom operators of others, such as polyattn's, on tensors of the device, in eager calls and in traced graphs.

A graph holds the CPU tensors inside the device's. So that what runs in it still meets tensors of the device, the graph
calls an operator of this module in the place of the custom one, which puts them back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch._library.simple_registry import singleton
from torch.utils._pytree import tree_flatten

from tests.emulators.npu import device

_SCHEMA = "(str op, str spec, Tensor[] tensors, SymInt[] sizes) -> Tensor[]"
_KEPT: list[torch.library.Library] = []
#: Operator -> its kernel for any device, for the dispatcher does not give it away.
_KERNELS: dict[str, Callable[..., Any]] = {}


def run(func: Any, args: Any, kwargs: Any) -> Any:
    """func's own kernel for any device, on tensors as they are; traced, a call of this module's operator."""
    flat = tree_flatten((args, kwargs))[0]
    if all(type(value.raw) is torch.Tensor for value in flat if isinstance(value, device.NpuTensor)):
        return _called(func.name(), args, kwargs)
    if kwargs or any(a.alias_info is not None for a in func._schema.arguments):
        raise NotImplementedError(f"(emulator) {func} has keywords or writes its arguments, and is traced")
    lowered = [device.lower(value) for value in args if isinstance(value, torch.Tensor)]
    sizes = [value for value in args if isinstance(value, torch.SymInt)]
    spec = [_said(value) for value in args]
    out = torch.ops.npu_emulator.composite(func.name(), json.dumps(spec), lowered, sizes)
    lifted = [device.lift(t) for t in out]
    return lifted[0] if len(func._schema.returns) == 1 else tuple(lifted)


def register() -> None:
    """Defines the operator, once a process, and from now on remembers the kernels of others."""
    torch.library.Library.impl = _remembered(torch.library.Library.impl)  # type: ignore[method-assign]
    library = torch.library.Library("npu_emulator", "DEF")
    library.define("composite" + _SCHEMA)
    library.impl("composite", _composite, "CompositeExplicitAutograd")
    torch.library.register_fake("npu_emulator::composite", _fake, lib=library)
    _KEPT.append(library)


def known(func: Any) -> bool:
    """Whether `run` has what it needs."""
    return func.name() in _KERNELS


def _remembered(impl: Callable[..., Any]) -> Callable[..., Any]:
    def remembered(library: Any, op: Any, kernel: Any, dispatch_key: str = "", **named: Any) -> Any:
        if dispatch_key == "CompositeExplicitAutograd" and isinstance(op, str):
            _KERNELS[f"{library.ns}::{op}"] = kernel
        return impl(library, op, kernel, dispatch_key, **named)

    return remembered


def _said(value: Any) -> Any:
    """In JSON: what the graph holds beside it, by where it is from; a scale that follows from a size is settled."""
    if isinstance(value, torch.Tensor):
        return {"from": "device" if isinstance(value, device.NpuTensor) else "host"}
    if isinstance(value, torch.SymInt):
        return {"from": "sizes"}
    return float(value) if isinstance(value, torch.SymFloat) else value


def _arguments(spec: str, tensors: list[torch.Tensor], sizes: list[int]) -> list[Any]:
    of_tensors, of_sizes = iter(tensors), iter(sizes)
    found: dict[str, Callable[[], Any]] = {
        "device": lambda: device.NpuTensor(next(of_tensors)),
        "host": lambda: next(of_tensors),
        "sizes": lambda: next(of_sizes),
    }
    return [found[value["from"]]() if isinstance(value, dict) else value for value in json.loads(spec)]


def _overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")


def _called(op: str, args: Any, kwargs: Any) -> Any:
    """The kernel's answer. A backward differentiates inside, but below a wrapper's dispatch autograd is shut out."""
    include, exclude = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradOther", "AutogradCPU", "AutogradPrivateUse1", "ADInplaceOrView"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        return _KERNELS[op](*args, **kwargs)


def _composite(op: str, spec: str, tensors: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    out = _called(op, _arguments(spec, tensors, sizes), {})
    return [device.lower(t).clone() for t in (out if isinstance(out, tuple | list) else (out,))]


def _fake(op: str, spec: str, tensors: list[torch.Tensor], sizes: list[int]) -> list[torch.Tensor]:
    kernel = singleton.find(_overload(op)._schema.name).fake_impl.kernel
    out = kernel(*_arguments(spec, tensors, sizes))
    made = out if isinstance(out, tuple | list) else (out,)
    return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="cpu") for t in made]
