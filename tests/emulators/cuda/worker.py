"""Runs the kit over one emulated backend, in a process that has it installed: a question in JSON, JSON out."""

from __future__ import annotations

import json
import sys
import types

import torch

from tests.emulators.cuda import quantise, repair
from tests.emulators.cuda.emulated import emulators_of


def main() -> None:
    """argv[1] is {"backend", "structures" or null, "dtypes"}; the report goes to standard output, as its last line."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    _without_triton()
    for emulator in emulators_of(asked["backend"]):
        emulator.install()

    from polyattn.testing import run_conformance

    report = run_conformance(
        f"cpu:{asked['backend']}",
        progress=_tell if asked.get("verbose") else None,
        structures=asked["structures"],
        dtypes=[getattr(torch, name) for name in asked["dtypes"]],
    )
    json.dump(report.as_dict(), sys.stdout)


def _without_triton() -> None:
    """What the platform's slots do by the core's Triton kernels, which take no CPU tensor, plain torch does here."""
    from polyattn.vendor import TORCH_ROWS

    rows = types.ModuleType("polyattn_cuda.rows", "Rows by torch, in the place of Triton's.")
    rows.ROWS = TORCH_ROWS  # type: ignore[attr-defined]
    sys.modules[rows.__name__] = rows
    sys.modules["polyattn_cuda.repair"] = repair
    sys.modules["polyattn_cuda.quantise"] = quantise


def _tell(done: int, total: int, label: str) -> None:
    sys.stderr.write(f"{done}/{total} {label}\n")


if __name__ == "__main__":
    main()
