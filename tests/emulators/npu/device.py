"""Tensors on a device that really is called `npu`: PrivateUse1 renamed, each tensor a wrapper of one on the CPU.

Once a process, and for good: `install` names the device, so it belongs into a process of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import return_and_correct_aliasing

from tests.emulators.npu import composites

#: Ops that take tensors of two devices, by name without overload; a number (0 axes) is taken by every op.
_ACROSS = ("aten::_to_copy", "aten::copy_", "aten::index", "aten::index_put", "aten::index_put_", "aten::set_")
#: Factories that torch builds by resizing an output, which a wrapper does not see.
_FACTORIES = (
    "arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm", "tril_indices",
    "triu_indices",
)  # fmt: skip
#: torch's ops that the device has its own kernels of.
OWN = ("aten::scaled_dot_product_attention",)
#: Names of the ops that read a device tensor on the host, in the order in which they ran.
host_reads: list[str] = []
#: Registrations, which end with their library.
_kept: list[torch.library.Library] = []


class NpuTensor(torch.Tensor):
    """A tensor of device npu:0; `raw` is the tensor on the CPU that holds its data."""

    raw: torch.Tensor

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> NpuTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, raw.shape, strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            layout=raw.layout, device=torch.device("npu", 0),
        )  # fmt: skip
        made.raw = raw
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten" and func.name() not in OWN:
            if torch.is_inference_mode_enabled():
                return _run_in_inference_mode(func, args, kwargs)
            return _run(func, args, kwargs)
        if func.namespace == "npu_emulator":  # a graph's, which has CPU tensors, but for a gradient that comes in
            return mapped(lift, func(*mapped(lower, args)))
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "PrivateUse1"):
            return func._op_dk(torch._C.DispatchKey.PrivateUse1, *args, **kwargs)
        if composites.known(func):
            return composites.run(func, args, kwargs)
        return _run(func, args, kwargs)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["raw"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], meta: None, size: Any, stride: Any) -> NpuTensor:
        return NpuTensor(inner["raw"])

    def untyped_storage(self) -> torch.UntypedStorage:
        """The CPU tensor's, for the wrapper's own has no data; torch's tracers want that of the wrapper.

        But where it has no element: they resize what stands in for it, which the device of a wrapper does not do.
        """
        tracing = sys._getframe(1).f_globals.get("__name__", "").startswith("torch._subclasses.")
        resized = type(self.raw) is not torch.Tensor and statically_known_true(self.raw.numel() == 0)
        return super().untyped_storage() if tracing and not resized else self.raw.untyped_storage()

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_listed_on_cpu(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        if _is_a_number_in_a_place(self, index, value):  # as the ops below would, of which each takes a tensor's time
            self.raw[index] = value
            torch.autograd.graph.increment_version(self)
        else:
            super().__setitem__(_listed_on_cpu(index), value)

    def new_tensor(self, data: Any, **kwargs: Any) -> torch.Tensor:
        """By torch.tensor: torch's own asserts on a wrapper."""
        return torch.tensor(data, **({"dtype": self.dtype, "device": self.device} | kwargs))

    def tolist(self) -> Any:
        """A read on the host."""
        host_reads.append("aten::tolist")
        return self.raw.tolist()

    def __repr__(self, **_: Any) -> str:
        return f"NpuTensor({self.raw!r})"


def _run_in_inference_mode(func: Any, args: Any, kwargs: Any) -> Any:
    """As a device does it: ops in their parts, as outside of the mode, and an ordinary view of an ordinary tensor.

    A wrapper that Python makes in this mode is an inference tensor, of any wrapper subclass. As a view torch then fails
    to give it the version counter of what it is a view of.
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
        return func.decompose(*args, **kwargs)
    if func.is_view and not args[0].is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return _run(func, args, kwargs)
    return _run(func, args, kwargs)


def _is_a_number_in_a_place(tensor: NpuTensor, index: Any, value: Any) -> bool:
    """Whether a number goes to whole numbers of places of a tensor that nobody traces or differentiates."""
    places = index if isinstance(index, tuple) else (index,)
    return (
        type(value) in (int, float, bool)
        and all(type(place) is int for place in places)
        and type(tensor.raw) is torch.Tensor
        and not tensor.requires_grad
        and not tensor.is_inference()
    )


def _listed_on_cpu(index: Any) -> Any:
    """Lists of places as CPU tensors, which index across devices: torch would build them on a wrapper's device."""
    if isinstance(index, tuple):
        return tuple(_listed_on_cpu(part) for part in index)
    if isinstance(index, list):
        return torch.tensor(index) if index else torch.empty(0, dtype=torch.long)
    return index


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """With every leaf of lists, tuples and dicts changed; torch's own walk of trees takes most of a small op's time."""
    if isinstance(value, dict):
        return {name: mapped(change, part) for name, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)([mapped(change, part) for part in value])
    if isinstance(value, tuple) and not isinstance(value, torch.Size):  # what torch.topk gives, by name
        return type(value)([mapped(change, part) for part in value])  # type: ignore[arg-type]
    return change(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor of lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)


def lower(value: Any) -> Any:
    """A tensor's CPU tensor and the device `cpu` for `npu`; anything else as it is."""
    if isinstance(value, NpuTensor):
        return value.raw
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    return value


def lift(value: Any) -> Any:
    """A CPU tensor, also one that a tracer stands in for, as one of the device; anything else as it is."""
    if not isinstance(value, torch.Tensor) or isinstance(value, NpuTensor) or value.device.type != "cpu":
        return value
    return NpuTensor(value.detach())


def same_device(name: str, values: Any) -> None:
    """RuntimeError where a tensor with axes is not on the device."""
    for value in tensors_in(values):
        if not isinstance(value, NpuTensor):
            raise RuntimeError(
                f"{name}: Expected all tensors to be on the same device, but found at least two devices, npu:0 and "
                f"{value.device}!"
            )


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """The CPU's answer, its tensors on the device unless the call asks for another one."""
    name = func.name().partition(".")[0]
    tensors = [*tensors_in(args), *tensors_in(kwargs)]
    if name not in _ACROSS:
        same_device(name, [value for value in tensors if value.dim()])
    target = kwargs.get("device")
    leaves = target is not None and torch.device(target).type != "npu"
    if name == "aten::_local_scalar_dense" or (leaves and any(isinstance(value, NpuTensor) for value in tensors)):
        host_reads.append(name)
    low_args, low_kwargs = mapped(lower, args), mapped(lower, kwargs)
    out = func(*low_args, **low_kwargs)
    if leaves:
        return out
    if name == "aten::set_":  # a wrapper cannot change its shape: the answer is another one
        return lift(out)
    on_device = target is not None or any(isinstance(value, NpuTensor) for value in tensors)
    if name == "aten::copy_" and not isinstance(args[0], NpuTensor):
        host_reads.append(name)
        return args[0]
    out = mapped(lift, out) if on_device else out
    return return_and_correct_aliasing(func, args, kwargs, out)


def install(module: Any) -> None:
    """Gives torch the device type npu and `module` as torch.npu; RuntimeError where the name is taken."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend("npu", backend_module=module)
    composites.register()
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    # nothing is cast by itself: what a caller relies on autocast for, it does not get here
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    factories = torch.library.Library("aten", "IMPL")
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        factories.impl(name, _made_here(op), "PrivateUse1")
    _kept.extend((everything, factories))
    torch.tensor = _built_on_cpu(torch.tensor)
    torch.as_tensor = _built_on_cpu(torch.as_tensor)


def _made_here(op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _run(op, args, kwargs)


def _built_on_cpu(build: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor, which asserts on a device of this kind."""

    def built(data: Any, *args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        if device is None or torch.device(device).type != "npu":
            return build(data, *args, device=device, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        if isinstance(data, NpuTensor):
            return build(data, *args, **kwargs)
        return build(data, *args, **kwargs).to(device).requires_grad_(requires_grad)

    return built
