"""Who says yes beside which torch, and who becomes the platform then: the real packages of all vendors together."""

from __future__ import annotations

import itertools
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from platforms.conftest import VENDORS
from platforms.tests.vendors import BUILDS, detection_of, no_devices, pretend
from polyattn.vendor import Declined, Found

#: torch's build, devices that it sees, devices of a plugin beside it -> who says yes, highest priority first.
TABLE = {
    "CUDA build": ("cuda", 8, None, ["cuda"]),
    "CUDA build without driver": ("cuda", 0, None, []),
    "ROCm build": ("rocm", 8, None, ["rocm"]),  # fault row 20: it answers torch.cuda's questions
    "ROCm build whose devices are hidden": ("rocm", 0, None, []),
    "XPU build": ("xpu", 2, None, ["xpu"]),
    "XPU build without device": ("xpu", 0, None, []),
    "CPU build that claims CUDA is available": ("cpu", 8, None, []),  # fault row 20: neither version is set
    "two vendors: CUDA and a plugin": ("cuda", 1, ("npu", 4), ["cuda", "npu"]),
    "two vendors: ROCm and a plugin": ("rocm", 1, ("musa", 2), ["rocm", "musa"]),
    "a plugin beside a CUDA build without driver": ("cuda", 0, ("npu", 4), ["npu"]),
}


@pytest.fixture(autouse=True)
def _nobodys_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor in VENDORS:
        pytest.importorskip(f"polyattn_{vendor}")
        no_devices(monkeypatch, detection_of(vendor))


@pytest.mark.parametrize("case", TABLE)
def test_who_says_yes(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    build, devices, plugin, expected = TABLE[case]
    pretend(monkeypatch, build, devices)
    if plugin is not None:
        name, count = plugin
        given = {"is_available": lambda: True, "is_initialized": lambda: False, "device_count": lambda: count}
        monkeypatch.setattr(torch, name, SimpleNamespace(**given), raising=False)
    answers = {vendor: detection_of(vendor).probe() for vendor in VENDORS}
    found = [vendor for vendor, answer in answers.items() if isinstance(answer, Found)]
    priority = {vendor: import_module(f"polyattn_{vendor}").platform().priority for vendor in VENDORS}
    assert sorted(found, key=lambda vendor: -priority[vendor]) == expected
    assert all(answer.reason for answer in answers.values() if isinstance(answer, Declined))


def test_no_two_platforms_share_a_priority() -> None:
    """So that the order of discovery never decides (fault row 19)."""
    priorities = [import_module(f"polyattn_{vendor}").platform().priority for vendor in VENDORS]
    assert len(set(priorities)) == len(VENDORS)
    assert min(priorities) > 0, "the CPU's is 0"


def test_no_build_is_claimed_by_two(monkeypatch: pytest.MonkeyPatch) -> None:
    for build, (one, other) in itertools.product(BUILDS, itertools.combinations(VENDORS, 2)):
        pretend(monkeypatch, build)
        assert not all(isinstance(detection_of(vendor).probe(), Found) for vendor in (one, other)), (build, one, other)
