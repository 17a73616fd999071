"""Detection of AMD ROCm, against stand-ins for torch: no device of this kind is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import polyattn_rocm
from polyattn.vendor import Declined, Found
from polyattn_rocm import detection

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
    platform = polyattn_rocm.platform()
    assert (platform.name, platform.device_type, platform.priority) == ("rocm", "cuda", 40)
    assert platform.collective_backend == "nccl"
    assert platform.backends == "polyattn_rocm.backends:BACKENDS"
    assert set(detection.VISIBILITY) <= set(platform.variables)


@pytest.mark.parametrize("build", BUILDS)
def test_only_our_build_of_torch_is_ours(monkeypatch: pytest.MonkeyPatch, build: str) -> None:
    pretend(monkeypatch, build)
    found = detection.probe()
    if build == "rocm":
        assert isinstance(found, Found)
        assert found.devices == 8
    else:
        assert isinstance(found, Declined)
        assert "torch" in found.reason


@pytest.mark.parametrize("variable", detection.VISIBILITY)
def test_a_variable_that_hides_every_device_is_named(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    pretend(monkeypatch, "rocm", devices=0)
    monkeypatch.setenv(variable, "-1")
    found = detection.probe()
    assert isinstance(found, Declined)
    assert f"{variable}='-1'" in found.reason


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 4),
        ({"HIP_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"HIP_VISIBLE_DEVICES": "0,2"}, 2),
        ({"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "-1"}, 1),
    ],
)
def test_lists_of_visible_devices(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int) -> None:
    counted = torch.cuda.device_count
    pretend(monkeypatch, "rocm")
    monkeypatch.setattr(torch.cuda, "device_count", counted)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_amdsmi", lambda: 4)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_amdsmi", lambda: [f"aaaaaaa{i}" for i in range(4)])
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    found = detection.probe()
    assert (found.devices if isinstance(found, Found) else 0) == count


def test_where_asking_the_runtime_would_break_a_fork_a_child_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "rocm", device_count=forbidden, _device_count_amdsmi=lambda: -1)
    monkeypatch.setattr(detection, "DRIVER_FILES", (__file__,))
    asked = []

    def answer(command: list[str], **_: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(stdout="a word of the driver's\n3\n")

    monkeypatch.setattr(detection.subprocess, "run", answer)
    found = detection.probe()
    assert isinstance(found, Found)
    assert found.devices == 3
    assert "torch.cuda.device_count()" in asked[0][-1]


def test_a_runtime_that_already_runs_is_asked_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "rocm", devices=2, is_initialized=lambda: True)
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
        "rocm",
        is_initialized=lambda: True,
        get_device_properties=lambda index: SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", name="AMD MI300X"),
    )
    monkeypatch.setenv(detection.VARIABLES[0], "0,1")
    facts = detection.machine("cuda:1")
    assert (facts.platform, facts.device_type, facts.index) == ("rocm", "cuda", 1)
    assert (facts.arch, facts.name) == ("gfx942", "AMD MI300X")
    assert facts.versions["torch"] == torch.__version__
    assert facts.env == {detection.VARIABLES[0]: "0,1"}


def test_facts_make_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "rocm", get_device_properties=forbidden)
    assert detection.machine("cuda").index == 0


@pytest.mark.parametrize(
    ("versions", "arch"),
    [((0, 90402, 90402), "gfx942"), ((0, 90010), "gfx90a"), ((110000,), "gfx1100"), ((90402, 90010), ""), ((), "")],
)
def test_without_a_context_only_devices_that_are_alike_are_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, versions: tuple[int, ...], arch: str
) -> None:
    nodes = []
    for number, version in enumerate(versions):
        nodes.append(tmp_path / str(number))
        nodes[-1].write_text(f"cpu_cores_count 0\ngfx_target_version {version}\nunique_id\n")
    pretend(monkeypatch, "rocm", get_device_properties=forbidden)
    monkeypatch.setattr(detection, "glob", lambda pattern: [str(node) for node in nodes])
    assert detection.machine("cuda:1").arch == arch


def test_capture_is_asked_of_the_device_module(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "rocm", is_current_stream_capturing=lambda: True)
    assert detection.capturing() is True
    monkeypatch.delattr(torch.cuda, "is_current_stream_capturing")
    assert detection.capturing() is False
