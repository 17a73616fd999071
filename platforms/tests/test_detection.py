"""What detection promises for every vendor, against stand-ins for torch: no device is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from platforms.tests.vendors import BUILDS, detection_of, forbidden, no_devices, pretend
from polyattn.vendor import Declined, Found

Child = Callable[[str], Path]


@pytest.fixture
def detection(vendor: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = detection_of(vendor)
    no_devices(monkeypatch, module)
    return module


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, detection: ModuleType) -> Child:
    """Lets a shell script stand for the Python that counts in a child process; returns the file of its arguments."""

    def stand_in(script: str) -> Path:
        asked, python = tmp_path / "asked", tmp_path / "python"
        python.write_text(f'#!/bin/sh\necho "$@" > {asked}\n{script}\n')
        python.chmod(0o755)
        pretend(monkeypatch, vendor, device_count=forbidden, **quiet(detection, -1))
        monkeypatch.setattr(detection, "DRIVER_FILES", (__file__,))
        monkeypatch.setattr(sys, "executable", str(python))
        return asked

    return stand_in


def quiet(detection: ModuleType, count: int) -> dict[str, object]:
    """torch's own count without the runtime, where it has one."""
    return {detection.QUIET_COUNT: lambda: count} if detection.QUIET_COUNT else {}


def test_the_entry_point_states_what_detection_knows(vendor: str, detection: ModuleType) -> None:
    platform = import_module(f"polyattn_{vendor}").platform()
    assert (platform.name, platform.device_type) == (vendor, detection.DEVICE_TYPE)
    assert platform.backends == f"polyattn_{vendor}.backends:BACKENDS"
    assert platform.variables == detection.VARIABLES
    assert set(detection.VISIBILITY) <= set(platform.variables)
    assert (platform.probe, platform.machine, platform.capturing) == (
        detection.probe,
        detection.machine,
        detection.capturing,
    )


@pytest.mark.parametrize("build", BUILDS)
def test_only_its_own_build_of_torch_is_served(
    monkeypatch: pytest.MonkeyPatch, vendor: str, detection: ModuleType, build: str
) -> None:
    pretend(monkeypatch, build)
    found = detection.probe()
    if build == vendor:
        assert isinstance(found, Found)
        assert found.devices == 8
    else:
        assert isinstance(found, Declined)
        assert "torch" in found.reason


def test_a_variable_that_hides_every_device_is_named(
    monkeypatch: pytest.MonkeyPatch, vendor: str, detection: ModuleType
) -> None:
    for variable in detection.VISIBILITY:
        pretend(monkeypatch, vendor, devices=0)
        monkeypatch.setenv(variable, "-1")
        found = detection.probe()
        assert isinstance(found, Declined)
        assert f"{variable}='-1'" in found.reason


def test_a_count_below_0_is_no_device(monkeypatch: pytest.MonkeyPatch, vendor: str, detection: ModuleType) -> None:
    """Runtimes answer -1 where they cannot tell."""
    pretend(monkeypatch, vendor, devices=-1)
    found = detection.probe()
    assert isinstance(found, Declined)
    assert "sees no device" in found.reason


def test_where_asking_the_runtime_would_break_a_fork_a_child_asks(child: Child, detection: ModuleType) -> None:
    asked = child('echo "a word of the driver\'s"; echo 3')
    found = detection.probe()
    assert isinstance(found, Found)
    assert found.devices == 3
    assert f"torch.{detection.DEVICE_TYPE}.device_count()" in asked.read_text()


def test_a_child_that_fails_is_a_reason_with_its_last_word(child: Child, detection: ModuleType) -> None:
    child('echo "Traceback ..." >&2; echo "RuntimeError: driver 5 is too old" >&2; echo >&2; exit 1')
    found = detection.probe()
    assert isinstance(found, Declined)
    assert found.reason.endswith("RuntimeError: driver 5 is too old")
    assert "Traceback" not in found.reason


def test_a_child_that_dies_silently_is_a_reason(child: Child, detection: ModuleType) -> None:
    child("kill -9 $$")
    found = detection.probe()
    assert isinstance(found, Declined)
    assert "-9" in found.reason


def test_a_child_that_hangs_is_a_reason(
    child: Child,
    monkeypatch: pytest.MonkeyPatch,
    detection: ModuleType,
) -> None:
    assert detection.CHILD_TIMEOUT_S == 30
    monkeypatch.setattr(detection, "CHILD_TIMEOUT_S", 0.2)
    child("exec sleep 60")
    found = detection.probe()
    assert isinstance(found, Declined)
    assert "0.2 s" in found.reason


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "npu", "xpu"], indirect=True)
def test_torchs_own_quiet_count_needs_no_child(
    child: Child,
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    detection: ModuleType,
) -> None:
    asked = child("exit 1")
    pretend(monkeypatch, vendor, devices=4, **quiet(detection, 4))
    found = detection.probe()
    assert isinstance(found, Found)
    assert found.devices == 4
    assert not asked.exists()


def test_a_runtime_that_already_runs_is_asked_itself(
    child: Child,
    monkeypatch: pytest.MonkeyPatch,
    vendor: str,
    detection: ModuleType,
) -> None:
    asked = child("exit 1")
    pretend(monkeypatch, vendor, devices=2, is_initialized=lambda: True, **quiet(detection, -1))
    found = detection.probe()
    assert isinstance(found, Found)
    assert found.devices == 2
    assert not asked.exists()


def test_a_torch_that_does_not_import_is_a_reason(monkeypatch: pytest.MonkeyPatch, detection: ModuleType) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = detection.probe()
    assert isinstance(found, Declined)
    assert "TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.reason


def test_facts_make_no_context_and_hold_what_is_set_and_installed(
    monkeypatch: pytest.MonkeyPatch, vendor: str, detection: ModuleType
) -> None:
    ask = ("get_device_properties", "get_device_capability", "get_device_name", "get_soc_version")
    pretend(monkeypatch, vendor, **dict.fromkeys(ask, forbidden))
    monkeypatch.setattr(detection, "DISTRIBUTIONS", ("pytest", "no-such-distribution"))
    monkeypatch.setenv(detection.VARIABLES[0], "0,1")
    facts = detection.machine(f"{detection.DEVICE_TYPE}:1")
    assert (facts.platform, facts.device_type, facts.index) == (vendor, detection.DEVICE_TYPE, 1)
    assert facts.versions["torch"] == torch.__version__
    assert facts.versions["pytest"] == pytest.__version__
    assert "no-such-distribution" not in facts.versions
    assert facts.env == {detection.VARIABLES[0]: "0,1"}
    assert detection.machine(detection.DEVICE_TYPE).index == 0


def test_capture_is_asked_of_the_device_module(
    monkeypatch: pytest.MonkeyPatch, vendor: str, detection: ModuleType
) -> None:
    detection._asking.cache_clear()  # whom to ask is remembered: the question comes with every call
    pretend(monkeypatch, vendor, is_current_stream_capturing=lambda: True)
    assert detection.capturing() is True
    detection._asking.cache_clear()
    monkeypatch.delattr(getattr(torch, detection.DEVICE_TYPE), "is_current_stream_capturing")
    assert detection.capturing() is False
    detection._asking.cache_clear()
