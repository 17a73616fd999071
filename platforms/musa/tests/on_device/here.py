"""The device of these tests, or its emulator, as platforms/tests/on_device takes it."""

from __future__ import annotations

from platforms.tests.on_device.device import Device, assert_near, exact

__all__ = ["MARK", "ON", "assert_near", "attend", "drawn", "exact"]

ON = Device("musa", ("mate", "mudnn"), collective="mccl")
MARK = ON.mark
attend, drawn = ON.attend, ON.drawn
