"""The ROCm backends that run on emulators, as backends of the CPU: `cpu:rocm_aiter` has the slots of `rocm:aiter`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

from polyattn.vendor import Backend, Machine
from tests.emulators.on_cpu import backend_on_cpu
from tests.emulators.rocm import stack

#: Backend -> the emulators that it needs, modules with `install()`; those of this room have VERSIONS and ENV, what they
#: pass for.
EMULATORS: dict[str, tuple[str, ...]] = {
    "aiter": ("rocm.aiter_module",),
    "flash_attn": ("rocm.flash_attn_2_cuda",),
    "flash_attn_triton": ("rocm.triton_amd",),
    "torch_varlen": ("rocm.aten_flash",),
    "flex": ("cuda.flex_hop",),
    "triton": (),
    "sdpa": ("rocm.sdpa",),
    "blocked": (),
}
#: Before the name of each, for the CPU has an `sdpa` of its own.
PREFIX = "rocm_"


def emulators_of(backend: str) -> tuple[ModuleType, ...]:
    """The emulators of a backend, imported; KeyError for a backend without."""
    return tuple(importlib.import_module(f"tests.emulators.{name}") for name in EMULATORS[backend])


def machine(backend: str) -> Machine:
    """The device passed for, with what the backend's emulators stand for."""
    now = stack.now()
    versions = {"torch": now.torch, "hip": now.hip, "triton": stack.TRITON, "pytorch-triton-rocm": stack.TRITON}
    env: dict[str, str] = {}
    for emulator in emulators_of(backend):
        versions |= getattr(emulator, "VERSIONS", {})
        env |= getattr(emulator, "ENV", {})
    if "amd-aiter" in versions:
        versions["amd-aiter"] = now.aiter
    return Machine(
        platform="rocm", device_type="cuda", arch=now.arch, name=now.chip.name, versions=versions, env=env
    )  # fmt: skip


def backend_of(name: str) -> Backend:
    """The ROCm backend of that name, as one of the CPU; LookupError where the platform has none, or a stranger."""
    return backend_on_cpu(name, machine(name))


def __getattr__(name: str) -> Callable[[], Backend]:
    known = name.removeprefix(PREFIX)
    if known not in EMULATORS:
        raise AttributeError(f"no emulated backend {known!r}; there are {', '.join(EMULATORS)}")
    return partial(backend_of, known)
