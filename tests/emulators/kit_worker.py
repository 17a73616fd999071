"""The kit over one emulated backend, in the process that has it installed: a question in JSON, JSON out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch

#: Its slots call the core's Triton kernels, under the interpreter.
INTERPRETED = "triton"


def asked() -> dict[str, Any]:
    """The arguments of `kit.Room.run_kit`."""
    question: dict[str, Any] = json.loads(sys.argv[1])
    return question


def report(name: str, question: dict[str, Any], emulators: Iterable[ModuleType]) -> dict[str, Any]:
    """The report of the backend `cpu:<name>`, with its emulators installed, on the machine now passed for."""
    torch.set_num_threads(1)
    for emulator in emulators:
        emulator.install()
    if question["backend"] != INTERPRETED:
        rows_by_torch()

    from polyattn.testing import run_conformance

    return run_conformance(
        f"cpu:{name}",
        progress=_tell if question["verbose"] else None,
        structures=question["structures"],
        dtypes=[getattr(torch, dtype) for dtype in question["dtypes"]],
        named=question["named"],
    ).as_dict()


def answer(found: dict[str, Any]) -> None:
    """To standard output, as its last line."""
    json.dump(found, sys.stdout)


def rows_by_torch() -> None:
    """What slots do by the core's Triton kernels for rows, which take no CPU tensor, plain torch does here."""
    from polyattn.backends import row_ops

    row_ops.TRITON_ROWS = row_ops.TORCH_ROWS


def _tell(done: int, total: int, label: str) -> None:
    sys.stderr.write(f"{done}/{total} {label}\n")
