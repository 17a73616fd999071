"""Where the six distributions of this checkout lie, how one is built, and how one installed here is lent elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VENDORS = ("cuda", "rocm", "npu", "xpu", "musa")


def build(project: Path, target: str, folder: Path) -> None:
    """Build one distribution with the installed hatchling: no network, and nothing left in the source tree."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", str(folder)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def lend(distribution: str, folder: Path) -> Path:
    """A folder that shows one installed distribution, and what it needs, of this environment: links, not copies."""
    folder.mkdir()
    todo, done = [distribution], set()
    while todo:
        name = todo.pop()
        try:
            held = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # needed on other systems only
        if held.name in done:
            continue
        done.add(held.name)
        for top in {file.parts[0] for file in held.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / top).exists():
                (folder / top).symlink_to(held.locate_file(top))
        todo += [re.split(r"[^\w.-]", need)[0] for need in held.requires or () if "extra ==" not in need]
    return folder


def run(*command: str) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
