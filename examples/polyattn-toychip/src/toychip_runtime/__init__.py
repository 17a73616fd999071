"""The runtime of toychip, an accelerator that does not exist: its device, and the one attention kernel of its maker."""

from __future__ import annotations

__version__ = "1.4"


def autoload() -> None:
    """The entry point of `torch.backends`: `import torch` calls it, and torch knows the device from then on.

    An older torch cannot have a device in Python: then there is none, and `import torch` does not fail for it.
    """
    import sys

    from torch.utils import backend_registration

    if hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        from toychip_runtime import device

        device.install(sys.modules[__name__])


# What torch, and a platform's detection, ask of torch.toychip.


def is_available() -> bool:
    """Whether a device is there."""
    return device_count() > 0


def is_initialized() -> bool:
    """Whether this process uses the device yet."""
    return True


def device_count() -> int:
    """How many there are; TOYCHIP_VISIBLE_DEVICES="" hides the only one."""
    import os

    return 1 if os.environ.get("TOYCHIP_VISIBLE_DEVICES", "0") == "0" else 0


def current_device() -> int:
    """The index of the device in use."""
    return 0


def get_device_name(index: int = 0) -> str:
    """What is printed on it."""
    return "ToyChip One"


def get_amp_supported_dtype() -> list[object]:
    """The dtypes that autocast may be asked for."""
    import torch

    return [torch.bfloat16]


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """torch.manual_seed calls it; the host's generator serves this device too."""
