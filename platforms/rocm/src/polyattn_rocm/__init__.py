"""polyattn on AMD ROCm: what this distribution brings through polyattn's vendor door."""

from polyattn.vendor import Platform
from polyattn_rocm import detection
from polyattn_rocm.order import order

__all__ = ["platform"]


def platform() -> Platform:
    """The entry point `rocm` of the group `polyattn.platforms`."""
    return Platform(
        name=detection.PLATFORM,
        device_type=detection.DEVICE_TYPE,
        priority=40,  # cuda 50, rocm 40, npu 30, xpu 20, musa 10, cpu 0
        probe=detection.probe,
        machine=detection.machine,
        backends="polyattn_rocm.backends:BACKENDS",
        order=order,
        collective_backend="nccl",
        capturing=detection.capturing,
        variables=detection.VARIABLES,
        cache_write="polyattn.vendor:write_rows",
    )
