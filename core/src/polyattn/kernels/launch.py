"""Starts a Triton kernel on the device of its tensors, whichever device is current, and says what that device is."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *args: Any, **constants: Any) -> None:
    """`kernel[grid](*args, **constants)` with `device` current; Triton itself looks only at the current device.

    Products and sums are fused, as is stated: Triton's default differs between its versions.
    """
    module = _module(device.type)
    if module is None or module.current_device() == device.index:
        kernel[grid](*args, enable_fp_fusion=True, **constants)
        return
    with module.device(device):
        kernel[grid](*args, enable_fp_fusion=True, **constants)


@cache
def architecture_of(device: torch.device) -> str:
    """What Triton compiles for on `device`: "sm_90", "gfx942"; "" for the CPU, where only the interpreter runs."""
    module = _module(device.type)
    if module is None:
        return ""
    with module.device(device):
        arch = triton.runtime.driver.active.get_current_target().arch
    return f"sm_{arch}" if isinstance(arch, int) else str(arch).partition(":")[0]


@cache
def _module(device_type: str) -> Any:
    """What knows the current device of a type; None for the CPU, where only the interpreter runs kernels."""
    return None if device_type == "cpu" else torch.get_device_module(device_type)
