"""Detection of Ascend NPU: what is its own. What it shares with the others is tested in platforms/tests."""

from __future__ import annotations

import sys

import pytest

import polyattn_npu
from platforms.tests.vendors import no_devices, pretend
from polyattn.vendor import Declined
from polyattn_npu import detection


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_devices(monkeypatch, detection)


def test_its_place_among_platforms() -> None:
    platform = polyattn_npu.platform()
    assert (platform.priority, platform.collective_backend) == (30, "hccl")


def test_architecture_and_name_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        monkeypatch,
        "npu",
        is_initialized=lambda: True,
        get_soc_version=lambda: 222,
        get_device_name=lambda index: "Ascend910B3",
    )
    facts = detection.machine("npu:1")
    assert (facts.arch, facts.name) == ("A2", "Ascend910B3")


def test_without_torch_npu_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cpu")
    monkeypatch.setattr(detection, "_runtime", lambda torch: "")
    found = detection.probe()
    assert isinstance(found, Declined)
    assert "torch-npu is not installed" in found.reason
    assert "CANN" in found.reason


def test_a_torch_npu_without_cann_is_a_reason_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cpu")
    monkeypatch.setattr(detection, "_runtime", lambda torch: "2.13.0")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    monkeypatch.setitem(sys.modules, "torch_npu", None)  # its import would raise
    found = detection.probe()
    assert isinstance(found, Declined)
    for words in ("torch-npu 2.13.0", "TORCH_DEVICE_BACKEND_AUTOLOAD=0", "ASCEND_HOME_PATH", "set_env.sh"):
        assert words in found.reason
