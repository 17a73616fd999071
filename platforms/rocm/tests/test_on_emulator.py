"""The fault cases of on_device/ on emulated packages, in processes that have them: our calls, not the kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulators.kit import PACKAGES, has_package
from tests.emulators.rocm.run_kit import ROOM

pytestmark = pytest.mark.emulated

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PORTABLE = ("flex", "sdpa", "blocked")
#: flash-attn has one of its two kinds of kernels in a process.
PROCESSES = {"composable kernel": ("aiter", "flash_attn", "torch_varlen"), "triton": ("flash_attn_triton",)}


@pytest.mark.parametrize("kernels", PROCESSES)
def test_on_the_emulated_device(kernels: str, tmp_path: Path) -> None:
    if not has_package("flash_attn"):
        pytest.skip(f"flash-attn's Python package is not here ({PACKAGES}=FOLDER that has it; the Makefile makes one)")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "platforms.rocm.tests.emulated_device",
        str(HERE / "on_device" / "test_fault_cases.py"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=ROOM.environment(tmp_path, (*PROCESSES[kernels], *PORTABLE)) | {"EMULATED_ROCM": "1"}, cwd=ROOT,
        capture_output=True, text=True, check=False, timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]


def test_without_a_device_they_skip_with_detections_reason() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "on_device")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("POLYATTN_")}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    if "passed" in done.stdout:
        pytest.skip("a ROCm device is here")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "is not a ROCm build" in done.stdout
