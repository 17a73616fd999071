"""What of Moore Threads MUSA is on this machine: presence, facts of one device, capture. Makes no device context."""

from __future__ import annotations

import os
import subprocess
import sys
from glob import glob
from importlib import metadata
from typing import Any

from polyattn.vendor import Declined, Found, Machine

#: Variables that hide devices. The runtime's own reading of them counts; parsing them here would be a second opinion.
VISIBILITY = ("MUSA_VISIBLE_DEVICES",)
#: Every variable that changes what runs here: facts of the machine, never set by us.
VARIABLES = (*VISIBILITY, "TORCHADA_PLATFORM", "TORCH_DEVICE_BACKEND_AUTOLOAD")
#: Kernel packages whose versions are facts of the machine.
DISTRIBUTIONS = ("flash_attn_3", "mate", "sageattention", "torch_musa", "torchada")
#: Device files, one of which is there wherever the driver is.
DRIVER_FILES = ("/dev/mtgpu*",)


def probe() -> Found | Declined:
    """Whether this torch serves Moore Threads MUSA and sees a device."""
    try:
        import torch
    except Exception as error:
        return Declined(f"torch cannot be imported ({error}); TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps its plugins out")
    reason = _unserved(torch)
    if reason:
        return Declined(reason)
    count = _count(torch)
    if count == 0:
        return Declined(f"torch_musa {_runtime(torch)} sees no device{_hidden()}")
    return Found(f"{count} device{'s' if count > 1 else ''}, torch_musa {_runtime(torch)}{_hidden()}", count)


def machine(device: str) -> Machine:
    """The facts of one device. A context is used where there is one, but never made: it would not survive a fork."""
    import torch

    index = int(device.partition(":")[2] or 0)
    arch, name = _arch_and_name(torch, index)
    installed = {package: version for package in DISTRIBUTIONS if (version := _installed(package))}
    return Machine(
        platform="musa",
        device_type="musa",
        index=index,
        arch=arch,
        name=name,
        versions={"torch": torch.__version__, "torch_musa": _runtime(torch), **installed},
        env={variable: os.environ[variable] for variable in VARIABLES if variable in os.environ},
    )


def capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    import torch

    ask = getattr(torch.musa, "is_current_stream_capturing", None)  # type: ignore[attr-defined]  # a plugin adds it
    return ask is not None and bool(ask())


def _unserved(torch: Any) -> str:
    """Why this torch cannot serve these devices; empty where it can."""
    if not hasattr(torch, "musa"):
        return (
            "torch has no musa device: torch_musa is not installed, or was not loaded (TORCH_DEVICE_BACKEND_AUTOLOAD)"
        )
    return ""


def _runtime(torch: Any) -> str:
    """The version of torch_musa."""
    return _installed("torch_musa")


def _count(torch: Any) -> int:
    """Devices that this process may use.

    The runtime, once asked, breaks a later fork. So it is asked here only where it already runs, or where no driver is
    that it could start. Otherwise a child process asks it.
    """
    if torch.musa.is_initialized() or not _driver():
        return int(torch.musa.device_count())
    code = "import torch; print(torch.musa.device_count())"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(answer.stdout.split()[-1])


def _driver() -> bool:
    """Whether the driver's device files are here."""
    return any(glob(pattern) for pattern in DRIVER_FILES)


def _hidden() -> str:
    """The variables that hide devices, as stated; empty where none is."""
    stated = [f"{variable}={os.environ[variable]!r}" for variable in VISIBILITY if variable in os.environ]
    return f" with {', '.join(stated)}" if stated else ""


def _installed(package: str) -> str:
    """The version of an installed distribution; empty where it is absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _arch_and_name(torch: Any, index: int) -> tuple[str, str]:
    """The architecture ("mp_31") and the name; both unknown without a context."""
    if not torch.musa.is_initialized():
        return "", ""
    major, minor = torch.musa.get_device_capability(index)
    return f"mp_{major}{minor}", str(torch.musa.get_device_name(index))
