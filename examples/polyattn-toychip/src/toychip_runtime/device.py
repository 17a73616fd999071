"""The device type `toychip`: torch's PrivateUse1 renamed, each tensor a wrapper of one in host memory.

This stands where a maker's runtime stands (torch_npu, torch_musa): in life it is C++ and a driver. Nothing of it is
needed to write a platform package, and nothing of polyattn is in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import return_and_correct_aliasing

from toychip_runtime import graphs

NAME = "toychip"
#: Ops that take tensors of two devices.
_ACROSS = ("aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::set_")
#: Factories that torch builds by resizing an output, which a wrapper does not see.
_FACTORIES = (
    "arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm", "tril_indices",
    "triu_indices",
)  # fmt: skip
#: Registrations end with their library, so they are kept.
_kept: list[torch.library.Library] = []


class ToyTensor(torch.Tensor):
    """A tensor of device toychip:0; `raw` is the host tensor that holds its data."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> ToyTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            layout=raw.layout, device=torch.device(NAME, 0),
        )  # fmt: skip
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "toychip":  # a graph's, which has host tensors, but for a gradient that comes in
            return _mapped(lift, func(*_mapped(lower, args)))
        if graphs.carries(func) and not kwargs:
            return graphs.carry(func, args)
        return _run(func, args, kwargs or {})

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        """For torch's tracers: the tensors that this one consists of."""
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> ToyTensor:
        return ToyTensor(inner["raw"])

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_listed_on_host(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if type(value) in (int, float, bool) and type(self.raw) is torch.Tensor and not self.requires_grad:
            self.raw[_lowered_index(index)] = value  # the same, without an op for each step of the way
            torch.autograd.graph.increment_version(self)
        else:
            super().__setitem__(_listed_on_host(index), value)

    def untyped_storage(self) -> torch.UntypedStorage:
        """The host tensor's, for the wrapper's own holds no data; torch's tracers want that of the wrapper."""
        tracing = sys._getframe(1).f_globals.get("__name__", "").startswith("torch._subclasses.")
        return super().untyped_storage() if tracing else self.raw.untyped_storage()

    def tolist(self) -> Any:
        """The numbers, on the host."""
        return self.raw.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"ToyTensor({self.raw!r})"


def _listed_on_host(index: Any) -> Any:
    """Lists of places as host tensors, which index across devices."""
    if isinstance(index, tuple):
        return tuple(_listed_on_host(part) for part in index)
    return torch.tensor(index, dtype=torch.long) if isinstance(index, list) else index


def _lowered_index(index: Any) -> Any:
    return _mapped(lower, index) if isinstance(index, tuple) else lower(index)


def lift(value: Any) -> Any:
    """A host tensor as one of the device; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, ToyTensor) or value.device.type != "cpu":
        return value
    return ToyTensor(value.detach())


def lower(value: Any) -> Any:
    """A device tensor's host tensor, and the host for the device; anything else as it is."""
    if isinstance(value, ToyTensor):
        return value.raw
    if isinstance(value, torch.device) and value.type == NAME:
        return torch.device("cpu")
    return value


def install(module: Any) -> None:
    """Gives torch the device type, and `module` as torch.toychip; once a process."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=module)
    graphs.define()
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    # nothing is cast by itself
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    factories = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        factories.impl(name, _made(getattr(getattr(torch.ops.aten, packet), overload or "default")), "PrivateUse1")
    _kept.extend((everything, factories))
    torch.tensor = _built_on_host(torch.tensor)


def _built_on_host(build: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor, which on its own asserts on a device of this kind."""

    def built(data: Any, *, device: Any = None, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != NAME:
            return build(data, device=device, requires_grad=requires_grad, **kwargs)
        return build(data, **kwargs).to(device).requires_grad_(requires_grad)

    return built


def _made(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(op, args, kwargs)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """The host's answer, its tensors on the device unless the call asks for another one."""
    name = func.name().partition(".")[0]
    tensors = [*_tensors_in(args), *_tensors_in(kwargs)]
    if name not in _ACROSS:
        _same_device(name, tensors)
    target = kwargs.get("device")
    out = func(*_mapped(lower, args), **_mapped(lower, kwargs))
    if target is not None and torch.device(target).type != NAME:
        return out
    if name == "aten::set_":  # a wrapper cannot change its shape: the answer is another one
        return lift(out)
    if name == "aten::copy_" and not isinstance(args[0], ToyTensor):
        return args[0]
    return return_and_correct_aliasing(func, args, kwargs, _mapped(lift, out))


def _same_device(name: str, tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        if tensor.dim() and not isinstance(tensor, ToyTensor):  # a number without axes may be anywhere
            raise RuntimeError(f"{name}: tensors are on {NAME}:0 and {tensor.device}")


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """With every leaf of lists, tuples and dicts changed."""
    if isinstance(value, dict):
        return {name: _mapped(change, part) for name, part in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        parts = [_mapped(change, part) for part in value]
        return type(value)(parts)  # type: ignore[arg-type]
    return change(value)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors_in(part)
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
