"""Ascend NPU on this machine: presence, facts of one device, capture. Makes no device context."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from glob import glob
from typing import Any

from polyattn.vendor import Declined, Found, Machine
from polyattn_npu import cann

PLATFORM = "npu"
#: torch's name of these devices, and of the module that serves them.
DEVICE_TYPE = "npu"
#: What serves them below torch, by the name that people know.
RUNTIME = "torch-npu"
#: Variables that hide devices. The runtime's own reading of them counts; parsing them here would be a second opinion.
VISIBILITY = ("ASCEND_RT_VISIBLE_DEVICES",)
#: By which MindIE-SD overrides the op of its manual mode at every call, and forces the torch release of its plugin.
FA_TYPE, PLUGIN_VARIANT = "MINDIE_SD_FA_TYPE", "MINDIESD_PLUGIN_VARIANT"
#: torch's switch for loading vendors' packages by itself, and the variable of CANN's set_env.sh.
AUTOLOAD, CANN_HOME = "TORCH_DEVICE_BACKEND_AUTOLOAD", cann.CANN_HOME
#: Every variable that changes what runs here: facts of the machine, never set by us.
VARIABLES = (
    *VISIBILITY,
    FA_TYPE,
    PLUGIN_VARIANT,
    "ASCEND_CUSTOM_OPP_PATH",
    AUTOLOAD,
    CANN_HOME,
)
#: Kernel packages whose versions are facts of the machine.
DISTRIBUTIONS = ("mindiesd", "torch-npu", "triton-ascend")
#: Device files, one of which is there wherever the driver is.
DRIVER_FILES = ("/dev/davinci[0-9]*",)
#: torch's own count of devices that does not start the runtime; below 0 where it cannot tell.
QUIET_COUNT = "_device_count_ascend_hal"
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

#: The vendor's numbers of each device class.
SOC_VERSIONS = {"310P": range(200, 206), "A2": range(220, 226), "A3": range(250, 256), "A5": range(260, 261)}


def _unserved(torch: Any) -> str:
    """Why this torch cannot serve these devices; empty where it can. torch-npu is never imported to find out.

    Its import without CANN leaves half of it in the process, and a variable set.
    """
    if hasattr(torch, "npu"):
        return ""
    version = _runtime(torch)
    if not version:
        return (
            "torch has no npu device: torch-npu is not installed; pip install torch==X torch-npu==X.postN, "
            "the pair that fits your CANN"
        )
    return "; ".join((f"torch has no npu device: torch-npu {version} is installed and not loaded", *_unloaded()))


def _runtime(torch: Any) -> str:
    """The version of torch-npu."""
    from polyattn.vendor import installed_versions

    return installed_versions(["torch-npu"]).get("torch-npu", "")


def _arch_and_name(torch: Any, index: int) -> tuple[str, str]:
    """The device class ("A2") and the name ("Ascend910B3"); both unknown without a context."""
    if not torch.npu.is_initialized():
        return "", ""
    try:
        soc = int(torch.npu.get_soc_version())
    except Exception:  # what a runtime that lacks its CANN raises: then nothing is known
        return "", ""
    known = [arch for arch, numbers in SOC_VERSIONS.items() if soc in numbers]
    return known[0] if known else f"soc{soc}", str(torch.npu.get_device_name(index))


def _build_facts() -> dict[str, Any]:
    """Which CANN is below torch-npu, where something here says so."""
    version = cann.installed()
    return {cann.FACT: version} if version else {}


def _unloaded() -> Iterator[str]:
    """What keeps an installed torch-npu out, as far as it shows without loading it."""
    if os.environ.get(AUTOLOAD) == "0":
        yield f"{AUTOLOAD}=0 keeps it out: unset it where CANN is installed"
    if not os.environ.get(CANN_HOME):
        yield f"CANN's {CANN_HOME} is not set: install its toolkit and kernels, then source its set_env.sh"


def has_installed(machine: Machine, distribution: str) -> bool:
    """Whether a machine has the distribution that this process has: what it does not state of it, this one may tell."""
    from polyattn.vendor import installed_versions

    name = distribution.lower()
    return machine.versions.get(name) == installed_versions([name]).get(name, "")
