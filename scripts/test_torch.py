"""Runs the core's unit and CPU conformance tests on another torch: `python scripts/test_torch.py 2.6.0`.

Standard library only, since it runs before anything is installed. It makes .venv-torch-<version> with the Python that
runs it and leaves docs/torch_versions/<version>.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path

from torch_record import write_record

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("tests/unit", "tests/conformance")

# What the installed torch asks for on this machine. On some platforms the registry has only builds for GPUs; those load
# their libraries at import, so they are needed even here, but the GPU compiler is not.
NEEDS_OF_TORCH = """
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for need in map(Requirement, requires("torch")):
    if need.name != "triton" and (need.marker is None or need.marker.evaluate({"extra": ""})):
        need.marker = None
        print(need)
"""


def main() -> int:
    """Set up, test, record; the exit status is pytest's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version", help="a torch version that the registry has, such as 2.6.0")
    version = parser.parse_args().version
    home = ROOT / f".venv-torch-{version}"
    python = environment(home, version)
    report = home / "junit.xml"
    rooms = [room for room in ROOMS if (ROOT / room).is_dir()]
    status = subprocess.call([python, "-m", "pytest", *rooms, "-q", f"--junitxml={report}"], cwd=ROOT)
    if report.exists():
        record = Path("docs", "torch_versions", f"{version}.json")
        print(write_record(ROOT / record, report, python, rooms), "->", record)
    return status


def environment(home: Path, version: str) -> str:
    """The Python of an environment with that torch, the core and what its tests need; made once."""
    python = str(home / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    ready = home / "ready"
    if not ready.exists():
        venv.create(home, with_pip=True, clear=True)
        install(python, "--no-deps", f"torch=={version}")
        install(python, *subprocess.check_output([python, "-c", NEEDS_OF_TORCH], text=True).splitlines())
        # --no-deps, or pip would complete torch with what was left out.
        install(python, "--no-deps", "--editable", str(ROOT))
        install(python, "hypothesis", "numpy", "pytest", "rich")
        subprocess.check_call([python, "-c", "import torch"])
        ready.touch()
    return python


def install(python: str, *packages: str) -> None:
    """One call of pip in that environment."""
    subprocess.check_call([python, "-m", "pip", "install", "--disable-pip-version-check", *packages])


if __name__ == "__main__":
    sys.exit(main())
