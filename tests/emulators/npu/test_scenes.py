"""The emulated device under torch_npu, the real MindIE-SD and diffusers, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).parents[3]
#: Folders with the vendor's real Python packages, where they are not installed.
PACKAGES = "EMULATED_PACKAGES"


@pytest.mark.parametrize("group", ["native", "mindiesd", "diffusers"])
def test_scenes(group: str, tmp_path: Path) -> None:
    folders = list(filter(None, os.environ.get(PACKAGES, "").split(os.pathsep)))
    here = importlib.util.find_spec(group) is not None or any(Path(folder, group).is_dir() for folder in folders)
    if group != "native" and not here:
        pytest.skip(f"{group} is not here (pip install --no-deps --target FOLDER {group}; {PACKAGES}=FOLDER)")
    paths = os.pathsep.join((str(ROOT), *folders))
    env = os.environ | {"PYTHONPATH": paths, "HOME": str(tmp_path), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [sys.executable, "-m", "tests.emulators.npu.scene", group]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
