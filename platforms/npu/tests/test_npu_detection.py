"""Detection of Ascend NPU: what is its own. What it shares with the others is tested in platforms/tests."""

from __future__ import annotations

import pytest

import polyattn_npu
from platforms.tests.vendors import no_devices, pretend
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
