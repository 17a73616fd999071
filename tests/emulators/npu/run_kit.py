"""The conformance kit over an NPU backend, on the emulated device of a machine that the caller describes.

    EMULATED_PACKAGES=FOLDER python -m tests.emulators.npu.run_kit npu:fusion --soc A3 --structures dense,packed

What passes here is our call into the vendor's ops and what we make of their answers; the vendor's kernels do not run.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.emulators.npu.stack import CANN, MINDIESD, SOCS, TORCH_NPU

ROOT = Path(__file__).parents[3]
#: Folders with the vendor's real Python packages, where they are not installed.
PACKAGES = "EMULATED_PACKAGES"
#: The module that answers for the process.
WORKER = "tests.emulators.npu.worker"


class WorkerFailedError(RuntimeError):
    """The process that runs the kit did not answer; its errors are the text."""


def run_kit(
    backend: str,
    *,
    structures: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
    named: str = "",
    shard: tuple[int, int] = (0, 1),
    long: bool = False,
    lint: bool = True,
    verbose: bool = False,
    **stack: str,
) -> dict[str, Any]:
    """The kit's report (`polyattn.testing.Report.as_dict`) of one backend, from a process of its own.

    Beside the kit's own cases run those of host_pages.py. `long`: those of long_cases.py, in the place of all.

    `stack` has the fields of stack.Stack: soc, torch_npu, cann, mindiesd. The report has three entries more: "stack",
    with the version and file of the real MindIE-SD that ran; "ops", how often each native op was called; "lints", what
    lint mode objected to, swallowed or not.
    """
    asked = {
        "backend": backend, "structures": structures, "dtypes": list(dtypes), "named": named, "shard": list(shard),
        "long": long, "stack": stack | {"lint": lint}, "verbose": verbose,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as site:
        done = subprocess.run(
            [sys.executable, "-m", WORKER, json.dumps(asked)],
            env=environment(Path(site), stack.get("torch_npu", "2.13.0")),
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


def has_package(name: str) -> bool:
    """Whether a package of the vendor's is installed, or in a folder that `EMULATED_PACKAGES` names."""
    folders = filter(None, os.environ.get(PACKAGES, "").split(os.pathsep))
    return importlib.util.find_spec(name) is not None or any(Path(folder, name).is_dir() for folder in folders)


def environment(site: Path, torch_npu: str) -> dict[str, str]:
    """Variables of a process that has the vendor's packages, and the record of an installed torch_npu in `site`."""
    info = site / f"torch_npu-{torch_npu}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {torch_npu}\n")
    ours = ("POLYATTN_", "MINDIE_", "MINDIESD_", "ASCEND_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join(filter(None, (str(ROOT), str(site), clean.get(PACKAGES), clean.get("PYTHONPATH"))))
    # HOME: MindIE-SD writes its log there
    return clean | {
        "PYTHONPATH": path, "HOME": str(site), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def main() -> int:
    """The command line; the exit status is 0 where the report is ok."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulators.npu.run_kit", description=__doc__)
    parser.add_argument("backend", help="such as npu:fusion")
    parser.add_argument("--structures", type=_words, help="such as dense,packed (default: all, and the claims too)")
    parser.add_argument("--dtypes", type=_words, default=("bfloat16", "float16", "float32"))
    parser.add_argument("--named", default="", help="only cases whose name has this")
    parser.add_argument("--soc", choices=SOCS, default="A2")
    parser.add_argument("--torch-npu", choices=TORCH_NPU, default="2.13.0")
    parser.add_argument("--cann", choices=CANN, default="8.5")
    parser.add_argument(
        "--unreleased-mindiesd", action="store_const", dest="mindiesd", const="unreleased", default="3.1.0",
        help=f"one that has quant_attention; --mindiesd names any of {', '.join(MINDIESD)}",
    )  # fmt: skip
    parser.add_argument("--mindiesd", choices=MINDIESD)
    parser.add_argument("--long", action="store_true", help="the cases of long_cases.py in the place of all")
    parser.add_argument("--no-lint", action="store_false", dest="lint", help="go on where the vendor's op would")
    parser.add_argument("--verbose", action="store_true", help="name each case on standard error before it runs")
    report = run_kit(**vars(parser.parse_args()))
    json.dump(report, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0 if report["ok"] else 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
