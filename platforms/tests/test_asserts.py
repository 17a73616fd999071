"""That what vendors' tests share says what it compared: pytest rewrites its asserts as it does those of test files."""

from __future__ import annotations

from platforms.tests.on_device import device, fault_cases


def test_the_shared_cases_tell_what_differs() -> None:
    for module in (device, fault_cases):
        assert "@pytest_ar" in vars(module), module.__name__
