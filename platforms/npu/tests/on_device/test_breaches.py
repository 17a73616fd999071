"""Planted breaches of the vendor's contract: the emulated device catches each, so that our calls cannot have it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.on_device.here import DEVICE, assert_near, drawn, exact, qkv
from polyattn_npu import batched, fusion_forward

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

KEEP = [[True, True, False, True, True, True, True], [True, False, True, True, True, True, True]]


@pytest.fixture(autouse=True)
def emulated_alone() -> None:
    """A real device would go on with garbage, or end the process."""
    if type(drawn(1)) is torch.Tensor:
        pytest.skip("a breach is planted on the emulated device alone")


def attend(**given: Any) -> None:
    tensors = qkv((2, 5), (2, 7))
    assert_near(pa.attention(*tensors, backend="fusion", **given), exact(*tensors, **given))


def asked_as(monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """The op is asked what `change` makes of the arguments."""
    op = fusion_forward._operator()
    monkeypatch.setattr(fusion_forward, "_operator", lambda: lambda **asked: op(**change(asked)))


def test_a_mask_of_the_other_polarity_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_as(monkeypatch, lambda asked: asked | {"atten_mask": asked["atten_mask"].logical_not()})
    with pytest.raises(AssertionError):
        attend(structure=pa.Mask.keys(KEEP))


def test_a_mask_that_is_not_whole_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched, "_hidden", lambda meta, *size: meta.keep.logical_not())
    with pytest.raises(RuntimeError, match="561103"):
        attend(structure=pa.Mask.keys(KEEP))


def test_a_missing_scale_is_a_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_as(monkeypatch, lambda asked: {name: value for name, value in asked.items() if name != "scale"})
    with pytest.raises(AssertionError):
        attend()


def test_a_scale_that_is_a_tensor_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_as(monkeypatch, lambda asked: asked | {"scale": torch.tensor(asked["scale"])})
    with pytest.raises(RuntimeError, match="'float' for argument 'scale'"):
        attend()


@pytest.mark.parametrize("ends", [lambda ends: torch.tensor(ends).to(DEVICE), lambda ends: [0, *ends]])
def test_boundaries_on_the_device_or_with_a_leading_0_are_refused(monkeypatch: pytest.MonkeyPatch, ends: Any) -> None:
    asked_as(monkeypatch, lambda asked: asked | {"actual_seq_qlen": ends(asked["actual_seq_qlen"])})
    with pytest.raises(RuntimeError, match="actual_seq_qlen"):
        pa.attention(*qkv((9,)), structure=pa.Packed.from_lengths([4, 5]), backend="fusion")


def test_a_sparse_mode_without_its_mask_is_full_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_as(monkeypatch, lambda asked: {name: value for name, value in asked.items() if name != "atten_mask"})
    with pytest.raises(AssertionError, match="full attention"):
        attend(causal=True)


def test_a_compressed_mask_of_other_content_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    asked_as(monkeypatch, lambda asked: asked | {"atten_mask": asked["atten_mask"].logical_not()})
    with pytest.raises(RuntimeError, match="triu"):
        attend(causal=True)


def test_rows_that_see_nothing_without_the_invalid_row_setting_are_the_mean_of_v(monkeypatch) -> None:
    asked_as(monkeypatch, lambda asked: asked | {"inner_precise": 0})
    with pytest.raises(AssertionError):
        attend(structure=pa.Mask.pairs([[True] * 7, [False] * 7, *[[True] * 7] * 3]))
