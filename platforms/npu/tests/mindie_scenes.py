"""Runs the scenes of a test module on the emulated device under the real MindIE-SD, in a process that has both.

A scene is a function `scene_<name>` of the module; `outcomes` gives each one's traceback, empty where it passed. A
device is named once a process, so that all scenes of one machine share one.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.emulators.npu.run_kit import PACKAGES, ROOT, environment, has_package


def scenes_of(names: dict[str, object]) -> list[str]:
    """The scenes of a module, from its globals()."""
    return [name for name in names if name.startswith("scene_")]


def passed(module: str, scene: str, **stack: str) -> None:
    """Fails with the scene's traceback; `stack` has fields of the emulator's Stack."""
    told = outcomes(module, json.dumps(stack))[scene]
    assert not told, told


@lru_cache
def outcomes(module: str, stack: str) -> dict[str, str]:
    """Scene -> traceback, from one process for all scenes of the module on this machine."""
    if not has_package("mindiesd"):
        pytest.skip(f"mindiesd is not here (pip install --no-deps --target FOLDER mindiesd; {PACKAGES}=FOLDER)")
    with tempfile.TemporaryDirectory() as site:
        done = subprocess.run(
            [sys.executable, "-m", "platforms.npu.tests.mindie_scenes", module, stack],
            env=environment(Path(site), "2.13.0"), cwd=ROOT, capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return told


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """An environment variable that polyattn reads anew."""
    import polyattn as pa

    os.environ[name] = value
    pa.reload_environment()
    try:
        yield
    finally:
        del os.environ[name]
        pa.reload_environment()


def main() -> None:
    """argv[1] names the module, argv[2] the machine; a JSON object is the last line of standard output."""
    import torch

    from tests.emulators.npu import stack, torch_npu_module

    torch.set_num_threads(1)
    with stack.using(**json.loads(sys.argv[2])):
        torch_npu_module.install()
        module = importlib.import_module(sys.argv[1])
        told = {name: _told(module, name) for name in scenes_of(vars(module))}
    sys.stdout.write("\n" + json.dumps(told) + "\n")


def _told(module: ModuleType, name: str) -> str:
    try:
        getattr(module, name)()
    except Exception:
        return traceback.format_exc()
    return ""


if __name__ == "__main__":
    main()
