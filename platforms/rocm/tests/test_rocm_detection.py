"""Detection of AMD ROCm: what is its own. What it shares with the others is tested in platforms/tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import polyattn_rocm
from platforms.tests.vendors import forbidden, no_devices, pretend
from polyattn.vendor import Found
from polyattn_rocm import detection


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_devices(monkeypatch, detection)


def test_its_place_among_platforms() -> None:
    platform = polyattn_rocm.platform()
    assert (platform.priority, platform.collective_backend) == (40, "nccl")


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
def test_23_lists_of_visible_devices(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int) -> None:
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


def test_20_a_rocm_build_is_this_platforms_whatever_torch_cuda_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    for hip, cuda, found in (("7.0.0", None, True), (None, "12.8", False), (None, None, False)):
        pretend(monkeypatch, "rocm")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        assert torch.cuda.is_available()
        assert isinstance(detection.probe(), Found) == found
    assert detection.DEVICE_TYPE == "cuda", "torch's name of these devices"


def test_architecture_and_name_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        monkeypatch,
        "rocm",
        is_initialized=lambda: True,
        get_device_properties=lambda index: SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-", name="AMD MI300X"),
    )
    facts = detection.machine("cuda:1")
    assert (facts.arch, facts.name) == ("gfx942", "AMD MI300X")


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
