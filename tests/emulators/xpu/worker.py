"""Answers `run_kit` for XPU, on the machine passed for."""

from __future__ import annotations

from tests.emulators import kit_worker
from tests.emulators.xpu import ipex, vllm_fa2
from tests.emulators.xpu.emulated import PREFIX, emulators_of
from tests.emulators.xpu.stack import lints, using


def main() -> None:
    """The report, with how often each emulated kernel ran."""
    asked = kit_worker.asked()
    backend = asked["backend"]
    with using(**asked["stack"]):
        report = kit_worker.report(PREFIX + backend, asked, emulators_of(backend))
    kit_worker.answer(report | {"ops": dict(vllm_fa2.counts + ipex.counts), "lints": lints})


if __name__ == "__main__":
    main()
