"""Whether a toychip is here, and the facts of one. Neither makes a device context, so that a fork stays possible."""

from __future__ import annotations

import os

from polyattn.vendor import Declined, Found, Machine

#: torch's name of the devices.
DEVICE_TYPE = "toychip"
#: The maker's variables that change what runs: shown by `polyattn info`, never set by us.
VARIABLES = ("TOYCHIP_VISIBLE_DEVICES",)


def probe() -> Found | Declined:
    """Yes with the number of devices, or no with what a user can do about it."""
    try:
        import torch
    except Exception as error:
        return Declined(f"torch cannot be imported ({error})")
    module = getattr(torch, DEVICE_TYPE, None)
    if module is None:
        return Declined("torch has no toychip device: torch is older than 2.11, or TORCH_DEVICE_BACKEND_AUTOLOAD is 0")
    count = module.device_count()
    if count == 0:
        stated = os.environ.get(VARIABLES[0])
        return Declined("no device is seen" + (f", with {VARIABLES[0]}={stated!r}" if stated is not None else ""))
    return Found(f"{count} device, toychip_runtime {module.__version__}", count)


def machine(device: str) -> Machine:
    """The facts by which routing decides; a described machine, from JSON, has the same."""
    import torch

    module = getattr(torch, DEVICE_TYPE)
    index = int(device.partition(":")[2] or 0)
    return Machine(
        platform="toychip",
        device_type=DEVICE_TYPE,
        index=index,
        arch="toy1",
        name=module.get_device_name(index),
        versions={"torch": torch.__version__, "toychip_runtime": module.__version__},
        env={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )
