"""Where the six distributions of this checkout lie, and how one is built."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENDORS = ("cuda", "rocm", "npu", "xpu", "musa")


def build(project: Path, target: str, folder: Path) -> None:
    """Build one distribution with the installed hatchling: no network, and nothing left in the source tree."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
