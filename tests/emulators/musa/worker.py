"""Answers `run_kit` for MUSA, on the machine passed for."""

from __future__ import annotations

from tests.emulators import kit_worker
from tests.emulators.musa import mate_kernels, mudnn
from tests.emulators.musa.emulated import PREFIX, emulators_of
from tests.emulators.musa.stack import lints, using


def main() -> None:
    """The report, with how often each emulated kernel ran."""
    asked = kit_worker.asked()
    backend = asked["backend"]
    with using(**asked["stack"]):
        report = kit_worker.report(PREFIX + backend, asked, emulators_of(backend))
    kit_worker.answer(report | {"ops": dict(mate_kernels.counts + mudnn.counts), "lints": lints})


if __name__ == "__main__":
    main()
