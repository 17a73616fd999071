"""Public fault reports, by their rows, on an XPU: the cases that all vendors share."""

from __future__ import annotations

from platforms.tests.on_device.device import Name
from platforms.tests.on_device.fault_cases import FaultCases
from platforms.xpu.tests.on_device.here import MARK, ON

pytestmark = MARK


class TestFaultCases(FaultCases):
    """With what is known of this vendor's routes."""

    on = ON

    def check_width(self, backend: Name, width: int, route: str) -> None:
        if backend == "vllm_xpu":
            assert route.startswith("pad(") == (width not in (80, 256))
