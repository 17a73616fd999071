"""The tests of on_device/ on emulated packages, each file in a process that has them: our calls, not the kernels."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulators.musa.run_kit import ROOM

pytestmark = pytest.mark.emulated

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
FILES = sorted(path.name for path in (HERE / "on_device").glob("test_*.py"))
BACKENDS = ("mate", "mudnn", "sdpa", "blocked")


@pytest.mark.parametrize("name", FILES)
def test_on_the_emulated_device(name: str, tmp_path: Path) -> None:
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "platforms.musa.tests.emulated_device",
        str(HERE / "on_device" / name),
    ]  # fmt: skip
    done = subprocess.run(
        command, env=ROOM.environment(tmp_path, BACKENDS) | {"EMULATED_MUSA": "1"}, cwd=ROOT, capture_output=True,
        text=True, check=False, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert re.search(r"\d+ passed", done.stdout), done.stdout[-2000:]


def test_without_a_device_they_skip_with_detections_reason() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "on_device")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("POLYATTN_")}
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    if "passed" in done.stdout:
        pytest.skip("a MUSA device is here")
    assert done.returncode == 0, done.stdout[-3000:]
    assert "torch has no musa device" in done.stdout
