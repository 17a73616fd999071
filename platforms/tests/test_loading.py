"""Packages that are installed and do not load: the next backend runs, and the reason is told."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from polyattn.choice import parse_choice
from polyattn.door import loading
from polyattn.routing import find_route
from polyattn.vendor import Backend, Machine, Rejected, Request, TensorFacts, resolve
from tests.unit.fakes import EVERYTHING, platform


@dataclass(frozen=True)
class Case:
    """A backend and its package: `versions` are what it requires, `arch` a device that it serves."""

    backend: str
    module: str
    versions: dict[str, str]
    arch: str = ""
    env: tuple[tuple[str, str], ...] = ()

    @property
    def vendor(self) -> str:
        return self.backend.partition(":")[0]

    def found(self) -> Backend:
        name = self.backend.partition(":")[2]
        backends: tuple[Backend, ...] = import_module(f"polyattn_{self.vendor}.backends").BACKENDS
        return next(backend for backend in backends if backend.name == name)

    def machine(self) -> Machine:
        versions = {"torch": torch.__version__, **self.versions}
        return Machine(self.vendor, "cpu", arch=self.arch, versions=versions, env=dict(self.env))


FLASH = {"flash-attn": "2.8.3"}
CASES = (
    Case("cuda:flash_attn", "flash_attn", FLASH, "sm_90"),
    Case("rocm:aiter", "aiter", {"amd-aiter": "0.1.7"}, "gfx942"),
    Case("rocm:flash_attn", "flash_attn", FLASH, "gfx942"),
    Case("rocm:flash_attn_triton", "flash_attn", FLASH, env=(("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE"),)),
    Case("xpu:vllm_xpu", "vllm_xpu_kernels", {"vllm-xpu-kernels": "0.1.16.2"}),
    Case(
        "xpu:ipex", "intel_extension_for_pytorch",
        {"intel-extension-for-pytorch": f"{'.'.join(torch.__version__.split('.')[:2])}.0+xpu"},
    ),
    Case("musa:mate", "flash_attn_interface", {"mate": "0.2.1", "flash_attn_3": "0.2.1"}, "mp_31"),
)  # fmt: skip
#: What the package does where it is imported -> what the reason says of it.
FAULTS = {
    "raise ImportError('libcudart.so.99: cannot open')": "ImportError: libcudart.so.99: cannot open",
    "raise OSError('libamdhip64.so: undefined symbol')": "OSError: libamdhip64.so",
    "raise RuntimeError('no compiler')": "RuntimeError: no compiler",
    "import no_such_dependency": "ModuleNotFoundError: No module named 'no_such_dependency'",
    "raise SystemExit(127)": "SystemExit: 127",
    "this is no Python": "SyntaxError",
    "import sys, types; [setattr(sys.modules[__name__], '__path__', [])]": "Error",  # without what is called
}


def forget() -> None:
    loading.forget()
    for name, module in list(sys.modules.items()):
        if name.startswith("polyattn_"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def take_out() -> dict[str, ModuleType]:
    """The packages' modules, out of sys.modules."""
    ours = {case.module for case in CASES}
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in ours}


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    forget()
    before = take_out()
    yield
    forget()
    take_out()
    sys.modules.update(before)


def install(case: Case, does: str, room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution of each name in `room`, whose module does that where it is imported."""
    case.found()  # what it says of files, it says of those before
    for package, version in case.versions.items():
        about = room / f"{package.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (room / case.module).mkdir()
    (room / case.module / "__init__.py").write_text(f"{does}\n")
    monkeypatch.syspath_prepend(str(room))


def request(dtype: str = "bfloat16") -> Request:
    facts = TensorFacts.contiguous((1, 8, 2, 64), dtype)
    return Request(facts, facts, facts, device="cpu", scale=0.125)


@pytest.mark.parametrize("does", FAULTS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.backend)
def test_a_package_that_does_not_load_is_a_reason(
    case: Case, does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(case, does, tmp_path, monkeypatch)
    (decision,) = resolve(request(), case.machine(), [case.found()])
    assert isinstance(decision, Rejected)
    (reason,) = decision.reasons
    assert "is installed and cannot be used in this process" in reason
    assert FAULTS[does] in reason
    assert "use another backend" in reason


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.backend)
def test_the_next_backend_runs(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(case, "raise OSError('libhsa.so: not found')", tmp_path, monkeypatch)
    backends = (case.found(), EVERYTHING)
    names = tuple(backend.name for backend in backends)
    choice = parse_choice(f"{names[0]},auto", "argument")
    found = find_route(request(), case.machine(), platform(*backends), backends, (choice,), lambda: {"toy": names})
    assert found.backend is EVERYTHING
    assert "libhsa.so: not found" in found.reasons[names[0]][0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.backend)
@pytest.mark.parametrize("other", [{"torch": "1.0+other"}, None], ids=["torch", "release"])
def test_nothing_is_imported_for_a_machine_that_is_described(
    case: Case, other: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_error", lambda bind: "it was imported")
    install(case, "", tmp_path, monkeypatch)
    here = case.machine()
    changed = other or {package: f"{version}.1" for package, version in case.versions.items()}
    (decision,) = resolve(request(), replace(here, versions={**here.versions, **changed}), [case.found()])
    assert "it was imported" not in " ".join(getattr(decision, "reasons", ()))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.backend)
def test_nothing_is_imported_for_a_request_that_is_refused_anyway(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_error", lambda bind: "it was imported")
    install(case, "", tmp_path, monkeypatch)
    for asked, taken in ((request("float32"), False), (request(), True)):
        (decision,) = resolve(asked, case.machine(), [case.found()])
        assert ("it was imported" in " ".join(getattr(decision, "reasons", ()))) == taken
