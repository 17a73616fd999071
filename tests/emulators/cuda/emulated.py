"""The CUDA backends that run on emulators of their native ops, and the machine that they are told they run on."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from polyattn.vendor import Machine

#: Backend (its module in polyattn_cuda has its name) -> the emulators it needs, modules of this folder.
#:
#: An emulator has `install()`, which registers ops or puts modules into sys.modules, and states what it passes for:
#: VERSIONS (distribution -> version) and, where a build has flags, BUILD_FACTS.
EMULATORS: dict[str, tuple[str, ...]] = {
    "fa3": ("fa3_ops", "aten_cudnn"),  # its gradients are cuDNN's
    "fa4": ("fa4",),
    "flash_attn": ("flash_attn_2_cuda",),
    "torch_varlen": ("aten_flash",),
    "cudnn": ("aten_cudnn",),
    "flex": ("flex_hop",),
    "sage": ("sage",),
    "fastvideo": ("fastvideo",),
}


def emulators_of(backend: str) -> tuple[ModuleType, ...]:
    """The emulators of a backend, imported; KeyError for a backend without."""
    return tuple(importlib.import_module(f"tests.emulators.cuda.{name}") for name in EMULATORS[backend])


def h200(backend: str) -> Machine:
    """An H200 that has what the backend's emulators pass for."""
    versions: dict[str, str] = {"torch": "2.11.0+cu130", "cuda": "13.0", "triton": "3.6.0"}
    build_facts: dict[str, Any] = {}
    for emulator in emulators_of(backend):
        versions |= getattr(emulator, "VERSIONS", {})
        build_facts |= getattr(emulator, "BUILD_FACTS", {})
    return Machine(
        platform="cuda", device_type="cuda", arch="sm_90", name="NVIDIA H200", versions=versions,
        build_facts=build_facts,
    )  # fmt: skip
