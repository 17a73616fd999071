"""Answers `run_kit` for ROCm, on the machine passed for."""

from __future__ import annotations

import torch

from tests.emulators import kit_worker
from tests.emulators.rocm import sdpa, stack
from tests.emulators.rocm.emulated import PREFIX, emulators_of


def main() -> None:
    """The report, with how often each of SDPA's kernels would have run."""
    asked = kit_worker.asked()
    backend = asked["backend"]
    with stack.using(**asked["stack"]) as passed_for:
        as_rocm_build(passed_for)
        report = kit_worker.report(PREFIX + backend, asked, emulators_of(backend))
    kit_worker.answer(report | {"sdpa": dict(sdpa.counts), "lints": stack.lints})


def as_rocm_build(passed_for: stack.Stack) -> None:
    """torch says of itself what a ROCm build says; its device type stays `cuda`."""
    torch.version.hip = passed_for.hip
    torch.version.cuda = None


if __name__ == "__main__":
    main()
