"""A constant of a device is made once, outlives inference and fake modes, and is dropped where too many are kept."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from polyattn.vendor import device_constant

CPU = torch.device("cpu")


@device_constant(limit=2)
def ones(device: torch.device, size: int) -> torch.Tensor:
    return torch.ones(size, device=device)


def test_calls_share_it_until_too_many_are_kept() -> None:
    first = ones(CPU, 3)
    assert ones(CPU, 3) is first
    ones(CPU, 4)
    ones(CPU, 5)
    assert ones(CPU, 3) is not first


def test_a_fake_mode_gets_its_own_and_leaves_what_is_kept() -> None:
    kept = ones(CPU, 6)
    with FakeTensorMode():
        assert isinstance(ones(CPU, 6), FakeTensor)
        ones(CPU, 7)
    assert ones(CPU, 6) is kept
    assert type(ones(CPU, 7)) is torch.Tensor


def test_inference_mode_makes_a_normal_one() -> None:
    with torch.inference_mode():
        assert not ones(CPU, 8).is_inference()


def test_what_is_made_in_a_graph_capture_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from polyattn.backends import constant

    with monkeypatch.context() as capture:
        capture.setattr(constant, "is_capturing", lambda device: True)
        made = ones(CPU, 9)
    assert ones(CPU, 9) is not made
