"""A platform for device types that nobody owns (mps, hpu, meta, ...): the core's generic SDPA backend."""

from __future__ import annotations

from functools import lru_cache

import torch

from polyattn.door.platform import Found, Machine, Platform


@lru_cache(maxsize=16)
def platform_of_unowned(device_type: str) -> Platform:
    """The generic platform for `device_type`, named after it."""

    def machine(device: str) -> Machine:
        index = int(device.partition(":")[2] or 0)
        return Machine(device_type, device_type, index=index, versions={"torch": torch.__version__})

    return Platform(
        name=device_type,
        device_type=device_type,
        priority=-1,
        probe=lambda: Found("no platform package owns this device type; torch's own SDPA serves it"),
        machine=machine,
        backends="polyattn.backends.generic:BACKENDS",
    )
