"""The XPU backends that run on emulators, as backends of the CPU: `cpu:xpu_sdpa` has the slots of `xpu:sdpa`.

That a tensor is on the device, no CPU tensor can tell: test_devices.py asks that of fake ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

from polyattn.vendor import Backend, Machine
from tests.emulators.on_cpu import backend_on_cpu
from tests.emulators.xpu.stack import current

#: Backend -> the emulators it needs, modules of this folder with `install()` and VERSIONS.
EMULATORS: dict[str, tuple[str, ...]] = {
    "vllm_xpu": ("vllm_fa2",),
    "ipex": ("ipex",),
    "sdpa": ("sdpa",),
    "blocked": (),
    "triton": (),
}

#: Backend -> what its packages need of the machine: IPEX loads beside the torch of its own number alone.
STACKS: dict[str, dict[str, str]] = {"ipex": {"torch": "2.8.0+xpu"}}
#: Before the name of each, for the CPU has an `sdpa` of its own.
PREFIX = "xpu_"


def emulators_of(backend: str) -> tuple[ModuleType, ...]:
    """The emulators of a backend, imported; KeyError for a backend without."""
    return tuple(importlib.import_module(f"tests.emulators.xpu.{name}") for name in EMULATORS[backend])


def machine(backend: str) -> Machine:
    """The device passed for, with what the backend's emulators stand for."""
    stack = current()
    versions = {"torch": stack.torch, "xpu": "20261.1", "triton": "3.9.0", "triton-xpu": "3.9.0"}
    for emulator in emulators_of(backend):
        versions |= emulator.VERSIONS
    return Machine(
        platform="xpu", device_type="xpu", arch=stack.arch, name=f"Intel {stack.device}", versions=versions
    )  # fmt: skip


def backend_of(name: str) -> Backend:
    """The XPU backend of that name, as one of the CPU; LookupError where the platform has none, or a stranger."""
    return backend_on_cpu(name, machine(name))


def __getattr__(name: str) -> Callable[[], Backend]:
    known = name.removeprefix(PREFIX)
    if known not in EMULATORS:
        raise AttributeError(f"no emulated backend {known!r}; there are {', '.join(EMULATORS)}")
    return partial(backend_of, known)
