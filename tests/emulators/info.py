"""`polyattn info` where an emulated vendor's platform is the current one: its own detection finds the emulated device.

    EMULATED_PACKAGES=FOLDER python -m tests.emulators.info xpu --json    # or rocm, musa

Emulated is what the vendor brings: what torch says of its build, its device module, its packages and their records.
The rest, all of polyattn, is as everywhere. One process has one vendor; what follows its name is for `polyattn info`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch.torch_version import TorchVersion

from tests.emulators.kit import install

#: Vendor -> the distributions that its emulators pass for and that have no record of their own in EMULATED_PACKAGES.
RECORDS: dict[str, Callable[[], Mapping[str, str]]] = {
    "rocm": lambda: import_module("tests.emulators.rocm.aiter_module").VERSIONS,
    "xpu": lambda: import_module("tests.emulators.xpu.ipex").VERSIONS,  # retired: beside torch 2.8 alone
    "musa": lambda: import_module("tests.emulators.musa.mate").VERSIONS,
}


def main() -> int:
    """argv: the vendor, then what `polyattn info` takes. The exit status is that command's."""
    vendor, *asked = sys.argv[1:]
    room = import_module(f"tests.emulators.{vendor}.run_kit")
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder)
        environment = room.ROOM.environment_of(site, {})
        for distribution, version in RECORDS[vendor]().items():
            install(site, distribution, {}, version)
        command = [sys.executable, "-c", f"from tests.emulators import info; info.tell({vendor!r}, {asked!r})"]
        return subprocess.run(command, env=environment, check=False).returncode


def tell(vendor: str, asked: list[str]) -> None:
    """The command, in a process that from here on is the vendor's."""
    PASS[vendor]()
    from polyattn.cli import main as polyattn

    sys.exit(polyattn(["info", *asked]))


def rocm() -> None:
    """torch's build for ROCm, with one device."""
    from tests.emulators.rocm import emulated, stack
    from tests.emulators.rocm.worker import as_rocm_build

    now = stack.now()
    as_rocm_build(now)
    torch.__version__ = TorchVersion(now.torch)
    _devices(torch.cuda, get_device_properties=_facts(gcnArchName=f"{now.arch}:sramecc+:xnack-", name=now.chip.name))
    _install(emulated, ("aiter", "flash_attn", "torch_varlen", "sdpa"))


def xpu() -> None:
    """torch's build for XPU, with one device."""
    from tests.emulators.xpu import emulated
    from tests.emulators.xpu.stack import current

    now = current()
    torch.version.xpu, torch.__version__ = "20261.1", TorchVersion(now.torch)
    _devices(torch.xpu, get_device_properties=_facts(architecture=int(now.arch, 16), name=f"Intel {now.device}"))
    _install(emulated, ("vllm_xpu", "sdpa"))


def musa() -> None:
    """torch with torch_musa loaded, and one device."""
    from tests.emulators.musa import emulated
    from tests.emulators.musa.stack import VERSIONS, current

    now = current()
    torch.__version__ = TorchVersion(VERSIONS["torch"])
    torch.musa = types.ModuleType("torch.musa", "Emulated.")
    _devices(torch.musa, get_device_capability=lambda _: now.capability, get_device_name=lambda _: f"MTT {now.card}")
    _install(emulated, ("mate", "mudnn", "sdpa"))


PASS: dict[str, Callable[[], None]] = {"rocm": rocm, "xpu": xpu, "musa": musa}


def _devices(module: Any, **facts: Any) -> None:
    """One device, in a runtime that already runs: its facts may then be asked for."""
    given = {"is_available": lambda: True, "is_initialized": lambda: True, "device_count": lambda: 1, **facts}
    for name, answer in given.items():
        setattr(module, name, answer)


def _facts(**facts: Any) -> Callable[[int], Any]:
    return lambda _: types.SimpleNamespace(**facts)


def _install(emulated: types.ModuleType, backends: tuple[str, ...]) -> None:
    for backend in backends:
        for emulator in emulated.emulators_of(backend):
            emulator.install()


if __name__ == "__main__":
    sys.exit(main())
