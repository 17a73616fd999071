"""Detection of Moore Threads MUSA, against stand-ins for torch: no device of this kind is needed."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyattn_musa
from polyattn.vendor import Declined, Found
from polyattn_musa import detection

#: What each build of torch says of itself: versions, and the devices that a plugin adds.
BUILDS: dict[str, dict[str, str]] = {
    "rocm": {"hip": "7.0.0"},
    "cuda": {"cuda": "12.8"},
    "xpu": {"xpu": "20250301"},
    "npu": {"npu": "plugin"},
    "musa": {"musa": "plugin"},
    "cpu": {},
}


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No driver and no vendor variable, whatever machine this is."""
    monkeypatch.setattr(detection, "DRIVER_FILES", ())
    for variable in detection.VARIABLES:
        monkeypatch.delenv(variable, raising=False)


def pretend(monkeypatch: pytest.MonkeyPatch, build: str, devices: int = 8, **answers: Any) -> None:
    """Make torch look like that build, with so many devices; `answers` are attributes of its device module."""
    says = BUILDS[build]
    for version in ("hip", "cuda", "xpu"):
        monkeypatch.setattr(torch.version, version, says.get(version), raising=False)
    given = {"is_available": lambda: True, "is_initialized": lambda: False, "device_count": lambda: devices, **answers}
    for plugin in ("npu", "musa"):
        if plugin in says:
            monkeypatch.setattr(torch, plugin, SimpleNamespace(**given), raising=False)
        else:
            monkeypatch.delattr(torch, plugin, raising=False)
    for module in (torch.cuda, torch.xpu):
        for name, answer in given.items():
            monkeypatch.setattr(module, name, answer, raising=False)


def forbidden(*_: object, **__: object) -> None:
    raise AssertionError("this makes a device context, or starts the runtime in this process")


def test_the_entry_point_states_the_platform() -> None:
    platform = polyattn_musa.platform()
    assert (platform.name, platform.device_type, platform.priority) == ("musa", "musa", 10)
    assert platform.collective_backend == "mccl"
    assert platform.backends == "polyattn_musa.backends:BACKENDS"
    assert set(detection.VISIBILITY) <= set(platform.variables)


@pytest.mark.parametrize("build", BUILDS)
def test_only_our_build_of_torch_is_ours(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    pretend(monkeypatch, build)
    found = detection.probe()
    if build == "musa":
        assert isinstance(found, Found)
        assert found.devices == 8
    else:
        assert isinstance(found, Declined)
        assert "torch" in found.reason


@pytest.mark.parametrize("variable", detection.VISIBILITY)
def test_a_variable_that_hides_every_device_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    pretend(monkeypatch, "musa", devices=0)
    monkeypatch.setenv(variable, "-1")
    found = detection.probe()
    assert isinstance(found, Declined)
    assert f"{variable}='-1'" in found.reason


def test_where_asking_the_runtime_would_break_a_fork_a_child_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "musa", device_count=forbidden)
    monkeypatch.setattr(detection, "DRIVER_FILES", (__file__,))
    asked = []

    def answer(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="a word of the driver's\n3\n")

    monkeypatch.setattr(detection.subprocess, "run", answer)
    found = detection.probe()
    assert isinstance(found, Found)
    assert found.devices == 3
    assert "torch.musa.device_count()" in asked[0][-1]


def test_a_runtime_that_already_runs_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "musa", devices=2, is_initialized=lambda: True)
    monkeypatch.setattr(detection, "DRIVER_FILES", (__file__,))
    monkeypatch.setattr(detection.subprocess, "run", forbidden)
    found = detection.probe()
    assert isinstance(found, Found)
    assert found.devices == 2


def test_a_torch_that_does_not_import_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = detection.probe()
    assert isinstance(found, Declined)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.reason


def test_facts_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        monkeypatch,
        "musa",
        is_initialized=lambda: True,
        get_device_capability=lambda index: (3, 1),
        get_device_name=lambda index: "MTT S5000",
    )
    monkeypatch.setenv(detection.VARIABLES[0], "0,1")
    facts = detection.machine("musa:1")
    assert (facts.platform, facts.device_type, facts.index) == ("musa", "musa", 1)
    assert (facts.arch, facts.name) == ("mp_31", "MTT S5000")
    assert facts.versions["torch"] == torch.__version__
    assert facts.env == {detection.VARIABLES[0]: "0,1"}


def test_facts_make_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "musa", get_device_capability=forbidden, get_device_name=forbidden)
    assert detection.machine("musa").index == 0


def test_capture_is_asked_of_the_device_module(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "musa", is_current_stream_capturing=lambda: True)
    assert detection.capturing() is True
    monkeypatch.delattr(torch.musa, "is_current_stream_capturing")
    assert detection.capturing() is False
