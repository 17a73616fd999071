"""polyattn on Moore Threads MUSA: what this distribution brings through polyattn's vendor door."""

from polyattn.vendor import Platform
from polyattn_musa import detection
from polyattn_musa.options import MusaOptions
from polyattn_musa.order import order

__all__ = ["MusaOptions", "platform"]


def platform() -> Platform:
    """The entry point `musa` of the group `polyattn.platforms`."""
    return Platform(
        name=detection.PLATFORM,
        device_type=detection.DEVICE_TYPE,
        priority=10,  # cuda 50, rocm 40, npu 30, xpu 20, musa 10, cpu 0
        probe=detection.probe,
        machine=detection.machine,
        backends="polyattn_musa.backends:BACKENDS",
        order=order,
        collective_backend="mccl",
        capturing=detection.capturing,
        variables=detection.VARIABLES,
        cache_write=None,
    )
