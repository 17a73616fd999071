"""polyattn on Intel XPU: what this distribution brings through polyattn's vendor door."""

from polyattn.vendor import Platform
from polyattn_xpu import detection
from polyattn_xpu.options import XpuOptions
from polyattn_xpu.order import order

__all__ = ["XpuOptions", "platform"]


def platform() -> Platform:
    """The entry point `xpu` of the group `polyattn.platforms`."""
    return Platform(
        name=detection.PLATFORM,
        device_type=detection.DEVICE_TYPE,
        priority=20,  # cuda 50, rocm 40, npu 30, xpu 20, musa 10, cpu 0
        probe=detection.probe,
        machine=detection.machine,
        backends="polyattn_xpu.backends:BACKENDS",
        order=order,
        collective_backend="xccl",
        capturing=detection.capturing,
        variables=detection.VARIABLES,
        cache_write=None,
    )
