"""The conformance kit over a MUSA backend whose packages are emulated on the CPU, on a card that the caller names.

    python -m tests.emulators.musa.run_kit mate --card S5000 --structures dense,packed

What passes here is our call into the vendor's packages and what we make of their answers; no kernel of theirs runs.
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

from tests.emulators.musa.emulated import EMULATORS, PREFIX
from tests.emulators.musa.stack import CARDS, SDKS

ROOT = Path(__file__).parents[3]


class WorkerFailedError(RuntimeError):
    """The process that runs the kit did not answer; its errors are the text."""


def run_kit(
    backend: str,
    *,
    structures: Sequence[str] | None = None,
    dtypes: Sequence[str] = ("bfloat16", "float16", "float32"),
    named: str = "",
    verbose: bool = False,
    **stack: Any,
) -> dict[str, Any]:
    """The kit's report (`polyattn.testing.Report.as_dict`) of one emulated backend, from a process of its own.

    `stack` has the fields of stack.Stack; lint is on unless it says otherwise. The report has two entries more: "ops",
    how often each emulated kernel ran, and "lints", what lint mode objected to, swallowed or not.
    """
    asked = {
        "backend": backend, "structures": structures, "dtypes": list(dtypes), "named": named, "verbose": verbose,
        "stack": {"lint": True} | stack,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as site:
        done = subprocess.run(
            [sys.executable, "-m", "tests.emulators.musa.worker", json.dumps(asked)],
            env=environment(Path(site), {f"cpu.{PREFIX}{backend}": f"tests.emulators.musa.emulated:{PREFIX}{backend}"}),
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


def environment(site: Path, entries: dict[str, str]) -> dict[str, str]:
    """Variables of a process that has these backends installed in `site`, by their entry points."""
    info = site / "emulated_musa-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-musa\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[polyattn.backends]", *lines, ""]))
    ours = ("POLYATTN_", "MUSA_", "MATE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join((str(ROOT), str(site)))
    return clean | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """The command line; the exit status is 0 where the report is ok."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulators.musa.run_kit", description=__doc__)
    parser.add_argument("backend", choices=EMULATORS)
    parser.add_argument("--structures", type=_words, help="such as dense,packed (default: all, and the claims too)")
    parser.add_argument("--dtypes", type=_words, default=("bfloat16", "float16", "float32"))
    parser.add_argument("--named", default="", help="only cases whose name has this")
    parser.add_argument("--card", choices=CARDS, default="S5000")
    parser.add_argument("--sdk", choices=SDKS, default="4.3.6")
    parser.add_argument("--no-lint", action="store_false", dest="lint", help="go on where the vendor would")
    parser.add_argument("--verbose", action="store_true", help="name each case on standard error before it runs")
    report = run_kit(**vars(parser.parse_args()))
    json.dump(report, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0 if report["ok"] else 1


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


if __name__ == "__main__":
    sys.exit(main())
