"""Runs the scenes of a test module over one backend on its emulator, in a process that has both installed.

A scene is a function `scene_<name>(backend)` of the module, `backend` being the name that it has on the CPU;
`outcomes` gives each one's traceback, empty where it passed.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]
#: Those of ROCm's own: the core's portable ones are tested where they are.
BACKENDS = ("aiter", "flash_attn", "flash_attn_triton", "torch_varlen")


def scenes_of(names: dict[str, object]) -> list[str]:
    """The scenes of a module, from its globals()."""
    return [name for name in names if name.startswith("scene_")]


def passed(module: str, scene: str, backend: str, **stack: str) -> None:
    """Fails with the scene's traceback; `stack` has fields of the emulator's Stack."""
    told = outcomes(module, backend, json.dumps(stack))[scene]
    assert not told, told


@lru_cache
def outcomes(module: str, backend: str, stack: str) -> dict[str, str]:
    """Scene -> traceback, from one process for all scenes of the module."""
    from tests.emulators.kit import PACKAGES, has_package
    from tests.emulators.rocm.run_kit import ROOM

    if backend.startswith("flash_attn") and not has_package("flash_attn"):
        pytest.skip(f"flash-attn's Python package is not here ({PACKAGES}=FOLDER that has it; the Makefile makes one)")
    with tempfile.TemporaryDirectory() as site:
        done = subprocess.run(
            [sys.executable, "-m", "platforms.rocm.tests.emulated", module, backend, stack],
            env=ROOM.environment(Path(site), [backend]), cwd=ROOT, capture_output=True, text=True, check=False,
            timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return told


def main() -> None:
    """argv: the module, the backend, the machine; a JSON object is the last line of standard output."""
    import torch

    from tests.emulators.kit_worker import rows_by_torch
    from tests.emulators.rocm import stack
    from tests.emulators.rocm.emulated import PREFIX, emulators_of
    from tests.emulators.rocm.worker import as_rocm_build

    name, backend, machine = sys.argv[1:]
    torch.set_num_threads(1)
    with stack.using(**json.loads(machine)) as passed_for:
        as_rocm_build(passed_for)
        for emulator in emulators_of(backend):
            emulator.install()
        rows_by_torch()
        module = importlib.import_module(name)
        told = {scene: _told(module, scene, PREFIX + backend) for scene in scenes_of(vars(module))}
    sys.stdout.write("\n" + json.dumps(told) + "\n")


def _told(module: ModuleType, scene: str, backend: str) -> str:
    try:
        getattr(module, scene)(backend)
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main()
