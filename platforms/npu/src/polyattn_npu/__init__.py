"""polyattn on Ascend NPU: what this distribution brings through polyattn's vendor door."""

from polyattn.vendor import Platform
from polyattn_npu import detection
from polyattn_npu.options import NpuOptions
from polyattn_npu.order import order

__all__ = ["NpuOptions", "platform"]


def platform() -> Platform:
    """The entry point `npu` of the group `polyattn.platforms`."""
    return Platform(
        name=detection.PLATFORM,
        device_type=detection.DEVICE_TYPE,
        priority=30,  # cuda 50, rocm 40, npu 30, xpu 20, musa 10, cpu 0
        probe=detection.probe,
        machine=detection.machine,
        backends="polyattn_npu.backends:BACKENDS",
        order=order,
        collective_backend="hccl",
        capturing=detection.capturing,
        variables=detection.VARIABLES,
        cache_write=None,  # torch's own index_copy writes pages
    )
