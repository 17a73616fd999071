"""The device of these tests, or its emulator, as platforms/tests/on_device takes it."""

from __future__ import annotations

import os

import torch

from platforms.rocm.tests.emulated_packages import PACKAGES
from platforms.tests.on_device.device import Device

__all__ = ["MARK", "ON"]

#: On a device those that the process does not have are refused, with that reason.
EVERY = ("aiter", "flash_attn", "flash_attn_triton", "torch_varlen")

ON = Device(
    "rocm", PACKAGES if os.environ.get("EMULATED_ROCM") == "1" else EVERY, portable=("flex", "sdpa", "blocked"),
    only_real=("triton",), collective="nccl", device_type="cuda", half=torch.bfloat16,
)  # fmt: skip
MARK = ON.mark
