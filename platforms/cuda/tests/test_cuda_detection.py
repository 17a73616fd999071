"""Detection of NVIDIA CUDA: what is its own. What it shares with the others is tested in platforms/tests."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

import polyattn_cuda
from platforms.tests.vendors import forbidden, no_devices, pretend
from polyattn.vendor import Found
from polyattn_cuda import detection


@pytest.fixture(autouse=True)
def clean_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    no_devices(monkeypatch, detection)


def test_its_place_among_platforms() -> None:
    platform = polyattn_cuda.platform()
    assert (platform.priority, platform.collective_backend) == (50, "nccl")


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 4),
        ({"CUDA_VISIBLE_DEVICES": ""}, 0),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "0,2,-1,1"}, 2),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaaaaa0-0000-1111-2222-bbbbbbbbbbbb"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "GPU-aaaaaaa0"}, 1),
    ],
)
def test_lists_of_visible_devices(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], count: int) -> None:
    counted = torch.cuda.device_count
    pretend(monkeypatch, "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", counted)
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: True)
    monkeypatch.setattr(torch.cuda, "_cached_device_count", None)
    monkeypatch.setattr(torch.cuda, "_raw_device_count_nvml", lambda: 4)
    monkeypatch.setattr(
        torch.cuda, "_raw_device_uuid_nvml", lambda: [f"GPU-aaaaaaa{i}-0000-1111-2222-bbbbbbbbbbbb" for i in range(4)]
    )
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    found = detection.probe()
    assert (found.devices if isinstance(found, Found) else 0) == count


def test_architecture_and_name_of_a_device_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        monkeypatch,
        "cuda",
        is_initialized=lambda: True,
        get_device_properties=lambda index: SimpleNamespace(major=9, minor=0, name="NVIDIA H200"),
    )
    facts = detection.machine("cuda:1")
    assert (facts.arch, facts.name) == ("sm_90", "NVIDIA H200")


@pytest.mark.parametrize(
    ("devices", "arch"),
    [([("sm_90", "H200")] * 2, "sm_90"), ([("sm_90", "H200"), ("sm_80", "A100")], ""), ([], "")],
)
def test_without_a_context_only_devices_that_are_alike_are_told(
    monkeypatch: pytest.MonkeyPatch, devices: list[tuple[str, str]], arch: str
) -> None:
    pretend(monkeypatch, "cuda", get_device_properties=forbidden)
    monkeypatch.setattr(detection, "_nvml_devices", lambda: devices)
    assert detection.machine("cuda:1").arch == arch
