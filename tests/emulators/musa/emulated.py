"""The MUSA backends that run on emulators, as backends of the CPU: `cpu:musa_sdpa` has the slots of `musa:sdpa`.

That a tensor is on the card, no CPU tensor can tell: test_devices.py asks that of fake ones.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType

from polyattn.vendor import Backend, Machine
from tests.emulators.musa.stack import VERSIONS, current
from tests.emulators.on_cpu import backend_on_cpu

#: Backend -> the emulators it needs, modules of this folder with `install()` and VERSIONS.
EMULATORS: dict[str, tuple[str, ...]] = {
    "mate": ("mate",),
    "mudnn": ("mudnn",),
    "sdpa": ("sdpa",),
    "blocked": (),
}
#: Before the name of each, for the CPU has an `sdpa` of its own.
PREFIX = "musa_"


def emulators_of(backend: str) -> tuple[ModuleType, ...]:
    """The emulators of a backend, imported; KeyError for a backend without."""
    return tuple(importlib.import_module(f"tests.emulators.musa.{name}") for name in EMULATORS[backend])


def machine(backend: str) -> Machine:
    """The device passed for, with what the backend's emulators stand for."""
    stack = current()
    versions = {"torch": VERSIONS["torch"], "torch_musa": VERSIONS["torch_musa"]}
    for emulator in emulators_of(backend):
        versions |= emulator.VERSIONS
    return Machine(
        platform="musa", device_type="musa", arch="mp_{}{}".format(*stack.capability), name=f"MTT {stack.card}",
        versions=versions,
    )  # fmt: skip


def backend_of(name: str) -> Backend:
    """The MUSA backend of that name, as one of the CPU; LookupError where the platform has none, or a stranger."""
    return backend_on_cpu(name, machine(name))


def __getattr__(name: str) -> Callable[[], Backend]:
    known = name.removeprefix(PREFIX)
    if known not in EMULATORS:
        raise AttributeError(f"no emulated backend {known!r}; there are {', '.join(EMULATORS)}")
    return partial(backend_of, known)
