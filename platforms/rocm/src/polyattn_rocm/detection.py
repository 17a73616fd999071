"""What of AMD ROCm is on this machine: presence, facts of one device, capture. Makes no device context."""

from __future__ import annotations

import os
import subprocess
import sys
from glob import glob
from importlib import metadata
from typing import Any

from polyattn.vendor import Declined, Found, Machine

#: Variables that hide devices. The runtime's own reading of them counts; parsing them here would be a second opinion.
VISIBILITY = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
#: Every variable that changes what runs here: facts of the machine, never set by us.
VARIABLES = (
    *VISIBILITY,
    "HSA_OVERRIDE_GFX_VERSION",
    "FLASH_ATTENTION_TRITON_AMD_ENABLE",
    "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
)
#: Kernel packages whose versions are facts of the machine.
DISTRIBUTIONS = ("amd-aiter", "flash-attn", "pytorch-triton-rocm", "triton")
#: Device files, one of which is there wherever the driver is.
DRIVER_FILES = ("/dev/kfd", "/dev/dxg")


def probe() -> Found | Declined:
    """Whether this torch serves AMD ROCm and sees a device."""
    try:
        import torch
    except Exception as error:
        return Declined(f"torch cannot be imported ({error}); TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps its plugins out")
    reason = _unserved(torch)
    if reason:
        return Declined(reason)
    count = _count(torch)
    if count == 0:
        return Declined(f"HIP {_runtime(torch)} sees no device{_hidden()}")
    return Found(f"{count} device{'s' if count > 1 else ''}, HIP {_runtime(torch)}{_hidden()}", count)


def machine(device: str) -> Machine:
    """The facts of one device. A context is used where there is one, but never made: it would not survive a fork."""
    import torch

    index = int(device.partition(":")[2] or 0)
    arch, name = _arch_and_name(torch, index)
    installed = {package: version for package in DISTRIBUTIONS if (version := _installed(package))}
    return Machine(
        platform="rocm",
        device_type="cuda",
        index=index,
        arch=arch,
        name=name,
        versions={"torch": torch.__version__, "hip": _runtime(torch), **installed},
        env={variable: os.environ[variable] for variable in VARIABLES if variable in os.environ},
    )


def capturing() -> bool:
    """Whether the current stream is being captured into a graph."""
    import torch

    ask = getattr(torch.cuda, "is_current_stream_capturing", None)
    return ask is not None and bool(ask())


def _unserved(torch: Any) -> str:
    """Why this torch cannot serve these devices; empty where it can."""
    if torch.version.hip is None:
        return f"this torch {torch.__version__} is not a ROCm build (torch.version.hip is None)"
    return ""


def _runtime(torch: Any) -> str:
    """The version of HIP."""
    return str(torch.version.hip)


def _count(torch: Any) -> int:
    """Devices that this process may use.

    The runtime, once asked, breaks a later fork. So it is asked here only where it already runs, where no driver is
    that it could start, or where AMD SMI answers in its place. Otherwise a child process asks it.
    """
    quietly = getattr(torch.cuda, "_device_count_amdsmi", None)
    if torch.cuda.is_initialized() or not _driver() or (quietly is not None and quietly() >= 0):
        return int(torch.cuda.device_count())
    code = "import torch; print(torch.cuda.device_count())"
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
    """The architecture ("gfx942") and the name; without a context, the kernel driver is asked."""
    if not torch.cuda.is_initialized():
        return _alike(_kfd_devices())
    facts = torch.cuda.get_device_properties(index)
    return str(facts.gcnArchName).partition(":")[0], str(facts.name)


def _kfd_devices() -> list[tuple[str, str]]:
    """Every GPU as the kernel driver lists it, without names; none where it lists nothing."""
    devices = []
    for path in sorted(glob("/sys/class/kfd/kfd/topology/nodes/*/properties")):
        try:
            with open(path, encoding="utf-8") as lines:
                facts = dict(line.split(maxsplit=1) for line in lines if " " in line)
            version = int(facts.get("gfx_target_version", "0"))
        except (OSError, ValueError):
            return []
        if version:  # 0 is a CPU node
            # 90402 is gfx942, 90010 gfx90a: major in decimal, minor and stepping one hexadecimal digit each
            devices.append((f"gfx{version // 10000}{version // 100 % 100:x}{version % 100:x}", ""))
    return devices


def _alike(devices: list[tuple[str, str]]) -> tuple[str, str]:
    """What all devices share. The driver counts by node, HIP its own way: a mixed machine stays unknown until used."""
    return devices[0] if len(set(devices)) == 1 else ("", "")
