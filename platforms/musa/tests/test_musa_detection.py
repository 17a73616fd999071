"""Detection of Moore Threads MUSA: what is its own. What it shares with the others is tested in platforms/tests."""

from __future__ import annotations

import pytest

import polyattn_musa
from platforms.tests.vendors import no_devices, pretend
from polyattn_musa import detection


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_devices(monkeypatch, detection)


def test_its_place_among_platforms() -> None:
    platform = polyattn_musa.platform()
    assert (platform.priority, platform.collective_backend) == (10, "mccl")


def test_architecture_and_name_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        monkeypatch,
        "musa",
        is_initialized=lambda: True,
        get_device_capability=lambda index: (3, 1),
        get_device_name=lambda index: "MTT S5000",
    )
    facts = detection.machine("musa:1")
    assert (facts.arch, facts.name) == ("mp_31", "MTT S5000")
