"""The command line called in this process, with distributions that exist for one test."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polyattn.cli import main
from polyattn.environment import VARIABLES, reload_environment
from tests.unit.discovery.conftest import VENDORS, install

#: A platform that a test describes by expressions; one backend needs a package, one takes packed documents in softcap.
TOY = """
from polyattn.vendor import *

HALF, SINGLE = frozenset({{"bfloat16"}}), frozenset({{"float32"}})
FAST = Backend("fast", (Slot("toy:fast", Features(dtypes=HALF, head_dims=range(8, 257, 8), lse=True)),),
               requires=(Requires("toy-kernels", "2.0", "pip install toy-kernels"),),
               check=lambda request, machine: () if machine.arch != "toy1" else ("toy1 is too old for it",))
PLAIN = Backend("plain", (
    Slot("toy:plain", Features(dtypes=HALF | SINGLE, head_dims=frozenset({{64, 128}}), causal=True)),
    Slot("toy:packed", Features(kinds=frozenset({{"packed"}}), dtypes=SINGLE, softcap=True)),
))

def machine(device):
    return Machine({name!r}, {device_type!r}, int(device.partition(":")[2] or 0), arch="toy2", name="Toy 2",
                   versions={{"toy-kernels": "2.1"}})

def platform():
    return Platform({name!r}, {device_type!r}, {priority}, lambda: {probe}, {machine}, {backends},
                    variables=("TOY_MODE", "TOY_LOG"))
"""


#: A third party's backend of the CPU, which asks for a package of its own.
FAST_ON_CPU = """
from polyattn.vendor import *

FAST = Backend("fast", (Slot("fast:run", Features(dtypes=frozenset({"bfloat16"}))),),
               requires=(Requires("fast-kernels", "2.0", "pip install fast-kernels"),))
"""


@dataclass
class Answer:
    """What a command printed and returned."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*VARIABLES, "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    reload_environment()
    yield
    reload_environment()


@pytest.fixture
def polyattn(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    """Run one command line in this process."""

    def run(*arguments: str) -> Answer:
        capsys.readouterr()
        return Answer(main(list(arguments)), *capsys.readouterr())

    return run


@pytest.fixture
def add_platform(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Install a distribution "<name>-attn" with this platform; the facts are expressions."""

    def add(
        name: str = "toy",
        device_type: str = "toy",
        priority: int = -1,
        probe: str = "Declined('no /dev/toy')",
        machine: str = "machine",
        backends: str = "(FAST, PLAIN)",
        source: str = TOY,
    ) -> None:
        module = f"{name}_attn_{tmp_path.name}".replace("-", "_")
        facts = {"name": name, "device_type": device_type, "priority": priority, "probe": probe}
        text = source.format(**facts, machine=machine, backends=backends)
        add_distribution(tmp_path, monkeypatch, f"{name}-attn", {module: text}, {name: f"{module}:platform"})

    return add


@pytest.fixture
def no_vendors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the vendor distributions that this checkout may have installed."""
    for name in VENDORS:
        add_distribution(tmp_path, monkeypatch, f"polyattn-{name}", {}, {})


def add_distribution(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    distribution: str,
    modules: dict[str, str],
    platforms: dict[str, str],
    backends: dict[str, str] | None = None,
) -> None:
    folder = install(root / distribution, distribution, modules, platforms, backends or {}, version="1.5")
    monkeypatch.syspath_prepend(folder)
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    reload_environment()


def add_kernels(root: Path, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Install the third-party backend "cpu:fast" and that version of the package that it requires."""
    monkeypatch.syspath_prepend(install(root / version / "fast-kernels", "fast-kernels", {}, {}, {}, version=version))
    add_distribution(
        root / version, monkeypatch, "fast-attn", {"fast_on_cpu": FAST_ON_CPU}, {}, {"cpu.fast": "fast_on_cpu:FAST"}
    )
