"""Runs the kit over one emulated backend, in a process that has it installed: a question in JSON, JSON out."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.emulators.musa import mate_kernels, mudnn
from tests.emulators.musa.emulated import PREFIX, emulators_of
from tests.emulators.musa.stack import lints, using


def main() -> None:
    """argv[1] has the arguments of `run_kit.run_kit`; the report goes to standard output, as its last line."""
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    with using(**asked["stack"]):
        for emulator in emulators_of(asked["backend"]):
            emulator.install()
        _rows_by_torch()

        from polyattn.testing import run_conformance

        report = run_conformance(
            f"cpu:{PREFIX}{asked['backend']}",
            progress=_tell if asked["verbose"] else None,
            structures=asked["structures"],
            dtypes=[getattr(torch, name) for name in asked["dtypes"]],
            named=asked["named"],
        )
    answer: dict[str, Any] = report.as_dict() | {"ops": dict(mate_kernels.counts + mudnn.counts), "lints": lints}
    json.dump(answer, sys.stdout)


def _rows_by_torch() -> None:
    """What slots do by the core's Triton kernels for rows, which take no CPU tensor, plain torch does here."""
    from polyattn.backends import row_ops

    row_ops.TRITON_ROWS = row_ops.TORCH_ROWS


def _tell(done: int, total: int, label: str) -> None:
    sys.stderr.write(f"{done}/{total} {label}\n")


if __name__ == "__main__":
    main()
