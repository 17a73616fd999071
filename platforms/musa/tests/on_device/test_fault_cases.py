"""Public fault reports, by their rows, on a MUSA device: the cases that all vendors share."""

from __future__ import annotations

from platforms.musa.tests.on_device.here import MARK, ON
from platforms.tests.on_device.device import Name
from platforms.tests.on_device.fault_cases import FaultCases

pytestmark = MARK


class TestFaultCases(FaultCases):
    """With what is known of this vendor's routes."""

    on = ON

    def check_width(self, backend: Name, width: int, route: str) -> None:
        if backend == "mate":
            assert route.endswith("mate")
