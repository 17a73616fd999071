"""Detection of Intel XPU: what is its own. What it shares with the others is tested in platforms/tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import polyattn_xpu
from platforms.tests.vendors import no_devices, pretend
from polyattn_xpu import detection


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_devices(monkeypatch, detection)


def test_its_place_among_platforms() -> None:
    platform = polyattn_xpu.platform()
    assert (platform.priority, platform.collective_backend) == (20, "xccl")


def test_architecture_and_name_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        monkeypatch,
        "xpu",
        is_initialized=lambda: True,
        get_device_properties=lambda index: SimpleNamespace(architecture=0x5004000, name="Intel Arc B580"),
    )
    facts = detection.machine("xpu:1")
    assert (facts.arch, facts.name) == ("0x5004000", "Intel Arc B580")


def test_an_architecture_that_sycl_does_not_know_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    for facts in (SimpleNamespace(architecture=0, name="Intel"), SimpleNamespace(name="Intel")):
        pretend(monkeypatch, "xpu", is_initialized=lambda: True, get_device_properties=lambda index, facts=facts: facts)
        assert (detection.machine("xpu:0").arch, detection.machine("xpu:0").name) == ("", "Intel")
