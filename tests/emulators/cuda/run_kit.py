"""The conformance kit over a CUDA backend whose native ops are emulated on the CPU.

    python -m tests.emulators.cuda.run_kit fa3 --structures dense,packed --dtypes bfloat16 --verbose

What passes here is our call into the vendor's ops and what we make of their answers; the vendor's kernels do not run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.emulators.cuda.emulated import EMULATORS

ROOT = Path(__file__).parents[3]
#: Folders with the vendors' real Python packages that an emulator stands under, where they are not installed.
PACKAGES = "EMULATED_PACKAGES"


class WorkerFailedError(RuntimeError):
    """The process that runs the kit did not answer; its errors are the text."""


def run_kit(
    backend: str,
    *,
    structures: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
    verbose: bool = False,
) -> dict[str, Any]:
    """The kit's report (`polyattn.testing.Report.as_dict`) for one emulated backend, from a process of its own."""
    asked = {"backend": backend, "structures": structures, "dtypes": list(dtypes), "verbose": verbose}
    with tempfile.TemporaryDirectory() as site:
        done = subprocess.run(
            [sys.executable, "-m", "tests.emulators.cuda.worker", json.dumps(asked)],
            env=_installed(Path(site), backend),
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=None if verbose else subprocess.PIPE,
            text=True,
            check=False,
        )
    if done.returncode != 0:
        raise WorkerFailedError(f"{backend}: the worker ended with {done.returncode}\n{done.stderr or ''}")
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def _installed(site: Path, backend: str) -> dict[str, str]:
    """The environment of a process that has the wrapped backend installed in `site` as "cpu.<backend>"."""
    info = site / "emulated_cuda-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-cuda\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    entry = f"cpu.{backend} = tests.emulators.cuda.wrapped:{backend}"
    (info / "entry_points.txt").write_text(f"[polyattn.backends]\n{entry}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLYATTN_")}
    path = os.pathsep.join(filter(None, (str(site), clean.get(PACKAGES), clean.get("PYTHONPATH"))))
    return clean | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """The command line; the exit status is 0 where the report is ok."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulators.cuda.run_kit", description=__doc__)
    parser.add_argument("backend", choices=EMULATORS)
    parser.add_argument("--structures", type=_words, help="such as dense,packed (default: all, and the claims too)")
    parser.add_argument("--dtypes", type=_words, default=("bfloat16", "float16", "float32"))
    parser.add_argument("--verbose", action="store_true", help="name each case on standard error before it runs")
    asked = parser.parse_args()
    report = run_kit(asked.backend, structures=asked.structures, dtypes=asked.dtypes, verbose=asked.verbose)
    json.dump(report, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0 if report["ok"] else 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
