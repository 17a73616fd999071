"""What of Intel XPU is on this machine: presence, facts of one device, capture. Makes no device context."""

from __future__ import annotations

import os
import subprocess
import sys
from glob import glob
from importlib import metadata
from typing import Any

from polyattn.vendor import Declined, Found, Machine

#: Variables that hide devices. The runtime's own reading of them counts; parsing them here would be a second opinion.
VISIBILITY = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
#: Every variable that changes what runs here: facts of the machine, never set by us.
VARIABLES = (*VISIBILITY, "ZE_FLAT_DEVICE_HIERARCHY", "VLLM_XPU_SPEC_DECODE_MAX_QLEN")
#: Kernel packages whose versions are facts of the machine.
DISTRIBUTIONS = ("pytorch-triton-xpu", "triton-xpu", "vllm-xpu-kernels")
#: Device files, one of which is there wherever the driver is.
DRIVER_FILES = ("/dev/dri/renderD*", "/dev/dxg")


def probe() -> Found | Declined:
    """Whether this torch serves Intel XPU and sees a device."""
    try:
        import torch
    except Exception as error:
        return Declined(f"torch cannot be imported ({error}); TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps its plugins out")
    reason = _unserved(torch)
    if reason:
        return Declined(reason)
    count = _count(torch)
    if count == 0:
        return Declined(f"XPU {_runtime(torch)} sees no device{_hidden()}")
    return Found(f"{count} device{'s' if count > 1 else ''}, XPU {_runtime(torch)}{_hidden()}", count)


def machine(device: str) -> Machine:
    """The facts of one device. A context is used where there is one, but never made: it would not survive a fork."""
    import torch

    index = int(device.partition(":")[2] or 0)
    arch, name = _arch_and_name(torch, index)
    installed = {package: version for package in DISTRIBUTIONS if (version := _installed(package))}
    return Machine(
        platform="xpu",
        device_type="xpu",
        index=index,
        arch=arch,
        name=name,
        versions={"torch": torch.__version__, "xpu": _runtime(torch), **installed},
        env={variable: os.environ[variable] for variable in VARIABLES if variable in os.environ},
    )


def capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    import torch

    ask = getattr(torch.xpu, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def _unserved(torch: Any) -> str:
    """Why this torch cannot serve these devices; empty where it can."""
    if torch.version.xpu is None:
        return f"this torch {torch.__version__} is not an XPU build (torch.version.xpu is None)"
    return ""


def _runtime(torch: Any) -> str:
    """The version of XPU."""
    return str(torch.version.xpu)


def _count(torch: Any) -> int:
    """Devices that this process may use.

    The runtime, once asked, breaks a later fork. So it is asked here only where it already runs, where no driver is
    that it could start, or where Level Zero Sysman answers in its place. Otherwise a child process asks it.
    """
    quietly = getattr(torch.xpu, "_device_count_zes", None)
    if torch.xpu.is_initialized() or not _driver() or (quietly is not None and quietly() >= 0):
        return int(torch.xpu.device_count())
    code = "import torch; print(torch.xpu.device_count())"
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
    """The architecture as SYCL numbers it, in hexadecimal, and the name; both unknown without a context."""
    if not torch.xpu.is_initialized():
        return "", ""
    facts = torch.xpu.get_device_properties(index)
    return f"{getattr(facts, 'architecture', 0):#x}", str(facts.name)
