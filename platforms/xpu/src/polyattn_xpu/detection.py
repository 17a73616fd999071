"""What of Intel XPU is on this machine: presence, facts of one device, capture. Makes no device context."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from functools import lru_cache
from glob import glob
from typing import Any

from polyattn.vendor import Declined, Found, Machine

PLATFORM = "xpu"
#: torch's name of these devices, and of the module that serves them.
DEVICE_TYPE = "xpu"
#: What serves them below torch, by the name that people know.
RUNTIME = "XPU"
#: Variables that hide devices. The runtime's own reading of them counts; parsing them here would be a second opinion.
VISIBILITY = ("ZE_AFFINITY_MASK", "ONEAPI_DEVICE_SELECTOR")
#: Every variable that changes what runs here: facts of the machine, never set by us.
VARIABLES = (*VISIBILITY, "ZE_FLAT_DEVICE_HIERARCHY", "VLLM_XPU_SPEC_DECODE_MAX_QLEN")
#: Kernel packages whose versions are facts of the machine.
DISTRIBUTIONS = ("intel-extension-for-pytorch", "pytorch-triton-xpu", "triton-xpu", "vllm-xpu-kernels")
#: Device files, one of which is there wherever the driver is.
DRIVER_FILES = ("/dev/dri/renderD*", "/dev/dxg")
#: torch's own count of devices that does not start the runtime; below 0 where it cannot tell.
QUIET_COUNT = "_device_count_zes"
#: Seconds that a child process may take to import torch and count.
CHILD_TIMEOUT_S = 30


# The steps of detection. Their text is the same in all of polyattn's vendor packages: tests/packaging/test_twins.py.


def probe() -> Found | Declined:
    """Whether this torch serves these devices and sees one."""
    try:
        import torch
    except Exception as error:
        return Declined(f"torch cannot be imported ({error}); TORCH_DEVICE_BACKEND_AUTOLOAD=0 keeps its plugins out")
    reason = _unserved(torch)
    if reason:
        return Declined(reason)
    seen_by = f"{RUNTIME} {_runtime(torch)}"
    try:
        count = _count(torch)
    except _CountError as error:
        return Declined(f"{seen_by} cannot count devices{_hidden()}: {error}")
    if count <= 0:
        return Declined(f"{seen_by} sees no device{_hidden()}")
    return Found(f"{count} device{'s' if count > 1 else ''}, {seen_by}{_hidden()}", count)


def machine(device: str) -> Machine:
    """The facts of one device. A context is used where there is one, but never made: it would not survive a fork."""
    import torch

    from polyattn.vendor import installed_versions

    index = int(device.partition(":")[2] or 0)
    arch, name = _arch_and_name(torch, index)
    runtime = {RUNTIME.lower(): _runtime(torch)}
    return Machine(
        platform=PLATFORM,
        device_type=DEVICE_TYPE,
        index=index,
        arch=arch,
        name=name,
        versions={"torch": torch.__version__, **runtime, **installed_versions(DISTRIBUTIONS)},
        build_facts=_build_facts(),
        env={variable: os.environ[variable] for variable in VARIABLES if variable in os.environ},
    )


def capturing() -> bool:
    """Whether the current stream is being captured into a graph; asked at every call."""
    return bool(_asking()())


@lru_cache(maxsize=1)
def _asking() -> Callable[[], Any]:
    import torch

    ask: Callable[[], Any] = getattr(getattr(torch, DEVICE_TYPE), "is_current_stream_capturing", bool)
    return ask


class _CountError(Exception):
    """Why the devices could not be counted."""


def _count(torch: Any) -> int:
    """Devices that this process may use.

    The runtime, once asked, breaks a later fork. So it is asked here only where it already runs, where no driver is
    that it could start, or where torch can count without it. Otherwise a child process asks it.
    """
    module = getattr(torch, DEVICE_TYPE)
    quietly = getattr(module, QUIET_COUNT, None)
    if module.is_initialized() or not _driver() or (quietly is not None and quietly() >= 0):
        return int(module.device_count())
    return _count_in_child()


def _count_in_child() -> int:
    """What a child process counts; _CountError with the last line of its errors where it does not."""
    command = [sys.executable, "-c", f"import torch; print(torch.{DEVICE_TYPE}.device_count())"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _CountError(f"a child process did not answer within {CHILD_TIMEOUT_S} s") from error
    if child.returncode != 0:
        said = child.stderr.strip().splitlines() or ["it said nothing"]
        raise _CountError(f"a child process ended with {child.returncode}: {said[-1].strip()}")
    return int(child.stdout.split()[-1])


def _driver() -> bool:
    """Whether the driver's device files are here."""
    return any(glob(pattern) for pattern in DRIVER_FILES)


def _hidden() -> str:
    """The variables that hide devices, as stated; empty where none is."""
    stated = [f"{variable}={os.environ[variable]!r}" for variable in VISIBILITY if variable in os.environ]
    return f" with {', '.join(stated)}" if stated else ""


# This vendor's own answers.


def _unserved(torch: Any) -> str:
    """Why this torch cannot serve these devices; empty where it can."""
    if torch.version.xpu is None:
        return f"this torch {torch.__version__} is not an XPU build (torch.version.xpu is None)"
    return ""


def _runtime(torch: Any) -> str:
    """The version of XPU."""
    return str(torch.version.xpu)


def _arch_and_name(torch: Any, index: int) -> tuple[str, str]:
    """The architecture as SYCL numbers it, in hexadecimal, and the name; both unknown without a context."""
    if not torch.xpu.is_initialized():
        return "", ""
    facts = torch.xpu.get_device_properties(index)
    number = getattr(facts, "architecture", 0)  # 0: this SYCL does not know
    return f"{number:#x}" if number else "", str(facts.name)


def _build_facts() -> dict[str, Any]:
    """None that a backend here asks for."""
    return {}
