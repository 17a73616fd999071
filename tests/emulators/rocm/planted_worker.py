"""Runs the kit over the planted backends of one emulator, with lint and without; what was wrong goes out as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from tests.emulators.rocm import stack
from tests.emulators.rocm.emulated import emulators_of
from tests.emulators.rocm.planted import PLANTED, PREFIX, Planted
from tests.emulators.rocm.worker import as_rocm_build


def main() -> None:
    """argv[1] is the emulated backend: {planted: {"lint": problems, "bare": problems, "native": cases}}."""
    torch.set_num_threads(1)
    as_rocm_build(stack.now())
    for emulator in emulators_of(sys.argv[1]):
        emulator.install()
    found: dict[str, Any] = {}
    for name, claims in PLANTED.items():
        if claims.on != sys.argv[1]:
            continue
        found[name] = {"native": 0}
        for key, lint in (("lint", True), ("bare", False)):
            with stack.using(lint=lint):
                found[name][key] = _problems(name, claims, found[name])
    json.dump(found, sys.stdout)


def _problems(name: str, claims: Planted, counted: dict[str, int]) -> list[str]:
    from polyattn.testing import run_conformance

    problems = []
    for case in claims.cases:
        backend = f"cpu:{PREFIX}{name}"
        report = run_conformance(backend, structures=[claims.kind], dtypes=[torch.bfloat16], named=case)
        problems += [f"{failure.case}: {problem}" for failure in report.failures for problem in failure.problems]
        counted["native"] += sum(results["native"] for results in report.counts[backend].values())
    return problems


if __name__ == "__main__":
    main()
