"""The tests of on_device/ on emulated packages, each file in a process that has them: our calls, not the kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulators.kit import PACKAGES, has_package
from tests.emulators.xpu.run_kit import ROOM

pytestmark = pytest.mark.emulated

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILES = sorted(path.name for path in (HERE / "on_device").glob("test_*.py"))
BACKENDS = ("vllm_xpu", "ipex", "sdpa", "blocked")


@pytest.mark.parametrize("name", FILES)
def test_on_the_emulated_device(name: str, tmp_path: Path) -> None:
    if not has_package("vllm_xpu_kernels"):
        pytest.skip(f"pip install --no-deps vllm-xpu-kernels==0.1.16.2, or {PACKAGES}=FOLDER that has its Python files")
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "platforms.xpu.tests.emulated_device",
        str(HERE / "on_device" / name),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=ROOM.environment(tmp_path, BACKENDS) | {"EMULATED_XPU": "1"}, cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]


def test_without_a_device_they_skip_with_detections_reason() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "on_device")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("POLYATTN_")}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    if "passed" in done.stdout:
        pytest.skip("an XPU is here")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "is not an XPU build" in done.stdout
