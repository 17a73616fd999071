"""Public fault reports about who is found, by their rows, with the real packages of all vendors: no device is needed.

What torch says of its build and of devices is pretended; scanning, detection, choice and reports are the real ones.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import polyattn as pa
from platforms.conftest import VENDORS
from platforms.tests.vendors import detection_of, no_devices, pretend
from polyattn.discovery import platform_for
from polyattn.environment import VARIABLES

#: `polyattn.discovery.state` is also the name of an object there.
STATE = import_module("polyattn.discovery.state")
#: torch's build, and a plugin whose devices are on the same host -> who comes first.
PAIRS = {
    ("cuda", "npu"): "cuda", ("cuda", "musa"): "cuda", ("rocm", "npu"): "rocm", ("rocm", "musa"): "rocm",
    ("xpu", "npu"): "npu", ("xpu", "musa"): "xpu",
}  # fmt: skip


@pytest.fixture(autouse=True)
def nobodys_machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for vendor in VENDORS:
        pytest.importorskip(f"polyattn_{vendor}")
        no_devices(monkeypatch, detection_of(vendor))
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    pa.reload_environment()
    yield
    monkeypatch.undo()
    pa.reload_environment()


def found(monkeypatch: pytest.MonkeyPatch, **ours: str) -> tuple[str, list[str]]:
    """The platform that is chosen now, under these variables of ours, and what was warned of."""
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    pa.reload_environment()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        name = pa.current_platform.name
    return name, [str(one.message) for one in caught]


def beside(monkeypatch: pytest.MonkeyPatch, plugin: str, devices: int = 1) -> None:
    """A plugin's devices beside those of torch's build."""
    given = {"is_available": lambda: True, "is_initialized": lambda: False, "device_count": lambda: devices}
    monkeypatch.setattr(torch, plugin, SimpleNamespace(**given), raising=False)


def shuffled(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Entry points are found in another order."""
    candidates = list(import_module("polyattn.discovery.scan").scan())
    random.Random(seed).shuffle(candidates)
    monkeypatch.setattr(STATE, "scan", lambda: tuple(candidates))


def test_19_beside_the_cpu_it_is_chosen_without_a_word(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    pretend(monkeypatch, vendor, devices=1)
    for seed in range(10):
        shuffled(monkeypatch, seed)
        assert found(monkeypatch) == (vendor, [])
    assert [report.name for report in pa.platforms() if report.status == "accepted"] in (
        [vendor, "cpu"],
        ["cpu", vendor],
    )


@pytest.mark.parametrize(("build", "plugin"), PAIRS)
def test_19_of_two_vendors_priority_decides_with_one_warning_that_names_both(
    monkeypatch: pytest.MonkeyPatch, build: str, plugin: str
) -> None:
    pretend(monkeypatch, build, devices=1)
    beside(monkeypatch, plugin)
    for seed in range(10):
        shuffled(monkeypatch, seed)
        name, told = found(monkeypatch)
        assert name == PAIRS[build, plugin]
        assert len(told) == 1
        assert all(word in told[0] for word in (build, plugin, "POLYATTN_PLATFORM"))
    for chosen in (build, plugin):
        assert found(monkeypatch, POLYATTN_PLATFORM=chosen) == (chosen, [])


def test_19_an_override_that_is_not_here_is_an_error_with_what_was_found(
    monkeypatch: pytest.MonkeyPatch, vendor: str
) -> None:
    absent = "npu" if vendor != "npu" else "musa"
    pretend(monkeypatch, vendor, devices=1)
    monkeypatch.setenv("POLYATTN_PLATFORM", absent)
    pa.reload_environment()
    with pytest.raises(pa.BackendUnavailable) as refusal:
        pa.current_platform.name  # noqa: B018
    assert all(word in str(refusal.value) for word in (absent, "POLYATTN_PLATFORM"))


def test_20_a_rocm_build_is_rocm_though_it_answers_for_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for hip, cuda, name in (("7.0.0", None, "rocm"), (None, "12.8", "cuda"), (None, None, "cpu")):
        pretend(monkeypatch, "rocm", devices=8)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert found(monkeypatch) == (name, [])
        platform = pa.current_platform
        assert (platform.is_rocm(), platform.is_cuda()) == (name == "rocm", name == "cuda")
        owner = platform_for("cuda")
        if name == "cpu":
            assert owner is None, "nobody claims these devices"
            continue
        assert platform.device_type == "cuda"
        assert owner is platform.platform
        assert platform.backends == import_module(f"polyattn_{name}.backends").BACKENDS, "whose forwards run"


def test_20_a_build_is_its_vendors_and_nobody_elses(monkeypatch: pytest.MonkeyPatch, vendor: str) -> None:
    pretend(monkeypatch, vendor, devices=2)
    assert found(monkeypatch) == (vendor, [])
    accepted = {report.name: report.devices for report in pa.platforms() if report.status == "accepted"}
    assert accepted[vendor] == 2
    assert accepted.keys() == {vendor, "cpu"}
    reasons = [report.reason for report in pa.platforms() if report.status == "declined"]
    assert len(reasons) == len(VENDORS) - 1
    assert all(reasons)


@pytest.mark.parametrize("value", ["", "-1"])
def test_23_where_a_variable_hides_every_device_the_cpu_is_chosen_and_the_report_names_it(
    monkeypatch: pytest.MonkeyPatch, vendor: str, value: str
) -> None:
    for variable in detection_of(vendor).VISIBILITY:
        with monkeypatch.context() as hiding:
            pretend(hiding, vendor, devices=0)
            hiding.setenv(variable, value)
            assert found(hiding) == ("cpu", [])
            (report,) = (report for report in pa.platforms() if report.name == vendor)
            assert report.status == "declined"
            assert f"{variable}={value!r}" in report.reason


@pytest.mark.parametrize("value", ["0,2,-1,1", "GPU-aaaaaaaa-0000-1111-2222-bbbbbbbbbbbb", "GPU-aaaa", "level_zero:*"])
def test_23_a_list_that_cannot_be_understood_here_is_the_runtimes_to_count(
    monkeypatch: pytest.MonkeyPatch, vendor: str, value: str
) -> None:
    for variable in detection_of(vendor).VISIBILITY:
        with monkeypatch.context() as hiding:
            pretend(hiding, vendor, devices=1)
            hiding.setenv(variable, value)
            assert found(hiding) == (vendor, [])
            (report,) = (report for report in pa.platforms() if report.name == vendor)
            assert report.devices == 1
            assert f"{variable}={value!r}" in (report.detail or "")
