"""Starts a Triton kernel on the device of its tensors, whichever device is current, and says what that device is.

Triton binds and looks at every argument anew in Python at each launch. Here a launch finds the code that was compiled
for one like it by a shorter key (`specialised.py`) and calls Triton's own runner of it, with the versions of Triton and
on the devices for which that is known to be the same; else, and the first time, Triton does it all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor
from triton.compiler import CompiledKernel

from polyattn.kernels.specialised import Layout, key_of, layout_of

#: Triton's own backends and versions with which the tests of this file have passed: what is done here is what they do.
#: That of AMD is not among them: it looks at the size of a tensor's memory, too.
_VERIFIED = {("cuda", (3, 6)), ("cuda", (3, 9))}
#: What is remembered at most: kernels with their constants, kinds of arguments of each, and compiled codes of a kind.
_MOST_VARIANTS = 1024
_MOST_KINDS = 64
_MOST_COMPILED = 256


class _Compiled(NamedTuple):
    """What Triton launches, and the constants that its runner takes behind the arguments."""

    code: CompiledKernel  # held, as its function is unloaded with it
    run: Callable[..., Any]
    stream_of: Callable[[int], int]
    constants: tuple[Any, ...]


class _Kind(NamedTuple):
    """Launches whose arguments have the same types. layout: None where Triton itself must look."""

    fake: bool
    layout: Layout | None
    compiled: dict[Hashable, _Compiled]


_Kinds = dict[tuple[type, ...], _Kind]


@dataclass(frozen=True, eq=False)
class _Variant:
    """A kernel with its constants, `num_warps` and the like among them."""

    kernel: Any
    constants: dict[str, Any]
    kinds: _Kinds = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Prepared:
    """A kernel with all that it is launched with but its first arguments, which change from launch to launch."""

    variant: _Variant
    numbers: tuple[Any, ...]
    kinds: _Kinds = field(default_factory=dict)


@dataclass(eq=False)
class Repeated:
    """A launch whose tensors have the same dtypes, on one device, each time; `absent` are the arguments behind them."""

    prepared: Prepared
    grid: tuple[int, int, int]
    device: torch.device
    absent: tuple[None, ...]
    compiled: _Compiled | None = None  #: for tensors at multiples of 16 bytes


def prepare(kernel: Any, *numbers: Any, **constants: Any) -> Prepared:
    """For `launch_prepared`, which looks at tensors alone: the kernel's arguments behind them, and its constants."""
    return Prepared(_variant_of(kernel, constants), numbers)


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` on `device`; tensors by position. Nothing happens to fake and meta tensors.

    Products and sums are fused, as is stated: Triton's default differs between its versions.
    """
    if device.type == "meta":
        return
    variant = _variant_of(kernel, constants)
    module = _module(device.type)
    if module is None or module.current_device() == device.index:
        _start(variant, grid, device, args)
        return
    with module.device(device):
        _start(variant, grid, device, args)


def launch_prepared(prepared: Prepared, grid: tuple[int, ...], device: torch.device, *tensors: Any) -> _Compiled | None:
    """`launch` of what was prepared, behind `tensors` (or None) -> what ran, where Triton need not be asked again."""
    if device.type == "meta":
        return None
    module = _module(device.type)
    if module is None or module.current_device() == device.index:
        return _start_prepared(prepared, grid, device, tensors)
    with module.device(device):
        return _start_prepared(prepared, grid, device, tensors)


def repeat(prepared: Prepared, grid: tuple[int, ...], device: torch.device, absent: int) -> Repeated:
    """For `launch_repeated`: `absent` is how many of the kernel's tensors are None behind those that are given."""
    x, y, z = (*grid, 1, 1)[:3]
    return Repeated(prepared, (x, y, z), device, (None,) * absent)


def launch_repeated(repeated: Repeated, *tensors: torch.Tensor) -> None:
    """`launch_prepared` of plain tensors (none is fake) on the device that was named: only their addresses differ."""
    addresses = [tensor.data_ptr() for tensor in tensors]
    low = 0
    for address in addresses:
        low |= address
    prepared, compiled, device = repeated.prepared, repeated.compiled, repeated.device
    if compiled is not None and not low & 15 and not prepared.variant.kernel.pre_run_hooks and not _watched():
        module = _module(device.type)
        if module is not None and module.current_device() == device.index:
            code, run, stream_of, constants = compiled
            run(
                *repeated.grid, stream_of(device.index), code.function, code.packed_metadata, None, None, None,
                *addresses, *repeated.absent, *prepared.numbers, *constants,
            )  # fmt: skip
            return
    started = launch_prepared(prepared, repeated.grid, device, *tensors, *repeated.absent)
    if not low & 15:
        repeated.compiled = started


def _start(variant: _Variant, grid: tuple[int, ...], device: torch.device, args: tuple[Any, ...]) -> _Compiled | None:
    """Launch on the current device -> what the next launch like this one need not ask Triton for."""
    kernel = variant.kernel
    kind = _kind_of(variant.kinds, kernel, args)
    if kind.fake:
        return None
    if kind.layout is None or kernel.pre_run_hooks or _watched():
        kernel[grid](*args, **variant.constants)
        return None
    key, addresses = key_of(kind.layout, args)
    key = (device.index, *key)
    compiled = kind.compiled.get(key)
    if compiled is not None:
        _run(compiled, grid, device, kind.layout, args, addresses, ())
        return compiled
    code = kernel[grid](*args, **variant.constants)
    if not isinstance(code, CompiledKernel):  # a hook of Triton's may keep it from compiling
        return None
    compiled = _compiled(variant, code, len(args))
    _remember(kind.compiled, key, compiled, _MOST_COMPILED)
    return compiled


def _start_prepared(
    prepared: Prepared, grid: tuple[int, ...], device: torch.device, tensors: tuple[Any, ...]
) -> _Compiled | None:
    """On the current device. What was prepared does not change, so that the tensors alone decide about the code."""
    kernel = prepared.variant.kernel
    kind = _kind_of(prepared.kinds, kernel, tensors)
    if kind.layout is None or kernel.pre_run_hooks or _watched():
        return _start(prepared.variant, grid, device, (*tensors, *prepared.numbers))
    key, addresses = key_of(kind.layout, tensors)
    key = (device.index, *key)
    compiled = kind.compiled.get(key)
    if compiled is not None:
        _run(compiled, grid, device, kind.layout, tensors, addresses, prepared.numbers)
        return compiled
    compiled = _start(prepared.variant, grid, device, (*tensors, *prepared.numbers))
    if compiled is not None:
        _remember(kind.compiled, key, compiled, _MOST_COMPILED)
    return compiled


def _run(
    compiled: _Compiled,
    grid: tuple[int, ...],
    device: torch.device,
    layout: Layout,
    args: tuple[Any, ...],
    addresses: list[int],
    numbers: tuple[Any, ...],
) -> None:
    """As Triton does it behind its own look at the arguments. It takes addresses for tensors, and asks no more then."""
    given = list(args)
    for at, address in zip(layout.tensors, addresses, strict=True):
        given[at] = address
    x, y, z = (*grid, 1, 1)[:3]
    code, run, stream_of, constants = compiled
    stream = stream_of(device.index)
    run(x, y, z, stream, code.function, code.packed_metadata, None, None, None, *given, *numbers, *constants)


def _variant_of(kernel: Any, constants: dict[str, Any]) -> _Variant:
    values = tuple(constants.values())
    key = (id(kernel), tuple(constants), values, tuple(map(type, values)))  # 1 == True, but they are other constants
    variant = _variants.get(key)
    if variant is None:
        if any(isinstance(value, torch.Tensor) for value in values):
            raise TypeError("a tensor is no constant: give it by position")
        variant = _Variant(kernel, {"enable_fp_fusion": True, **constants})  # keeps the kernel, and so its id
        _remember(_variants, key, variant, _MOST_VARIANTS)
    return variant


_variants: dict[Hashable, _Variant] = {}


def _kind_of(kinds: _Kinds, kernel: Any, args: tuple[Any, ...]) -> _Kind:
    types = tuple(map(type, args))
    kind = kinds.get(types)
    if kind is None:
        fake = any(issubclass(kind, FakeTensor) for kind in types)
        direct = not fake and isinstance(kernel, triton.JITFunction) and _direct()
        kind = _Kind(fake, layout_of(kernel.params, types) if direct else None, {})
        _remember(kinds, types, kind, _MOST_KINDS)
    return kind


@cache
def _direct() -> bool:
    """Whether this Triton launches as is done here, on this device."""
    return (triton.runtime.driver.active.get_current_target().backend, _version()) in _VERIFIED


def _version() -> tuple[int, ...]:
    """Triton's, without what follows the second number."""
    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def _watched() -> bool:
    """Whether somebody (a profiler of Triton's) wants to be told of launches, or changes how kernels are compiled."""
    runtime = triton.knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(
        (enter is not None and getattr(enter, "calls", True))
        or (leave is not None and getattr(leave, "calls", True))
        or getattr(runtime, "add_stages_inspection_hook", None) is not None
    )


def _compiled(variant: _Variant, code: CompiledKernel, given: int) -> _Compiled:
    """`code` as it is launched with the first `given` arguments of the kernel."""
    behind = variant.kernel.params[given:]
    constants = tuple(variant.constants.get(parameter.name, parameter.default) for parameter in behind)
    return _Compiled(code, code.run, triton.runtime.driver.active.get_current_stream, constants)


def _remember(found: dict[Any, Any], key: Hashable, value: Any, most: int) -> None:
    """Keep `value`, and at most `most` of them."""
    if len(found) >= most:
        found.clear()
    found[key] = value


@cache
def architecture_of(device: torch.device) -> str:
    """What Triton compiles for on `device`: "sm_90", "gfx942"; "" where none is present: only the interpreter runs."""
    module = _module(device.type)
    if module is None:
        return ""
    with module.device(device):
        arch = triton.runtime.driver.active.get_current_target().arch
    return f"sm_{arch}" if isinstance(arch, int) else str(arch).partition(":")[0]


@cache
def _module(device_type: str) -> Any:
    """What knows the current device of a type; None where there is none: on the CPU, and for fake tensors."""
    if device_type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device_type)
    return module if module.is_available() else None
