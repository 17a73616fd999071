"""The conformance kit over a ROCm backend whose native ops are emulated on the CPU, on a machine that is described.

    EMULATED_PACKAGES=FOLDER python -m tests.emulators.rocm.run_kit flash_attn --arch gfx950 --structures dense,packed

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

from tests.emulators.rocm.emulated import EMULATORS, PREFIX, emulators_of
from tests.emulators.rocm.stack import AITER, CHIPS, TORCH, Stack

ROOT = Path(__file__).parents[3]
#: Folders with the vendor's real Python packages that an emulator stands under, where they are not installed.
PACKAGES = "EMULATED_PACKAGES"
#: Variables that are the described machine's alone.
OURS = ("POLYATTN_", "FLASH_ATTENTION_", "TRITON_", "TORCH_ROCM_", "AITER_")


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

    `stack` has the fields of stack.Stack: arch, aiter, torch, lint. The report has two entries more: "sdpa", how often
    each of SDPA's kernels would have run, and "lints", what lint mode objected to, swallowed or not.
    """
    asked = {
        "backend": backend, "structures": structures, "dtypes": list(dtypes), "named": named, "verbose": verbose,
        "stack": stack,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as site:
        done = subprocess.run(
            [sys.executable, "-m", "tests.emulators.rocm.worker", json.dumps(asked)],
            env=environment(Path(site), backend),
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


def environment(site: Path, backend: str, entries: dict[str, str] | None = None) -> dict[str, str]:
    """Variables of a process that has the backend installed in `site`, by its entry point, and others by `entries`."""
    info = site / "emulated_rocm-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: emulated-rocm\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    entries = entries or {f"cpu.{PREFIX}{backend}": f"tests.emulators.rocm.emulated:{PREFIX}{backend}"}
    lines = [f"{name} = {target}" for name, target in entries.items()]
    (info / "entry_points.txt").write_text("\n".join(["[polyattn.backends]", *lines, ""]))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    for emulator in emulators_of(backend):
        clean |= getattr(emulator, "ENV", {})
    if backend == "triton":
        clean["TRITON_INTERPRET"] = "1"
    path = os.pathsep.join(filter(None, (str(ROOT), str(site), clean.get(PACKAGES))))
    return clean | {"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}


def main() -> int:
    """The command line; the exit status is 0 where the report is ok."""
    parser = argparse.ArgumentParser(prog="python -m tests.emulators.rocm.run_kit", description=__doc__)
    parser.add_argument("backend", choices=EMULATORS)
    parser.add_argument("--structures", type=_words, help="such as dense,packed (default: all, and the claims too)")
    parser.add_argument("--dtypes", type=_words, default=("bfloat16", "float16", "float32"))
    parser.add_argument("--named", default="", help="only cases whose name has this")
    parser.add_argument("--arch", choices=CHIPS, default=Stack.arch)
    parser.add_argument("--aiter", choices=AITER, default=Stack.aiter)
    parser.add_argument("--torch", choices=TORCH, default=Stack.torch)
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
