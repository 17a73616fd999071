"""Breaches of MindIE-SD's contract, planted in our slots: the emulated ops raise, or the answer is plainly wrong."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.mindie_scenes import passed, scenes_of
from polyattn_npu import NpuOptions, laser_forward, mindie_forward, mindie_packed

pytestmark = pytest.mark.emulated


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).half()


KEEP = torch.tensor([[1, 0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0, 1]], dtype=torch.bool)


def off_by(*tensors: torch.Tensor, backend: str = "mindie", options: Any = (), **asked: Any) -> float:
    """The largest error."""
    out = pa.attention(*(tensor.npu() for tensor in tensors), backend=backend, options=options, **asked)
    return float((out.cpu().double() - pa.reference_attention(*tensors, **asked).double()).abs().max())


def scene_a_mask_of_the_other_polarity() -> None:
    q, k = drawn(2, 5, 4, 32), drawn(2, 7, 4, 32)
    exact = mindie_forward.exact

    def flipped(*given: Any) -> Any:
        shaped = exact(*given)
        return shaped._replace(keep=~shaped.keep)

    with mock.patch.object(mindie_forward, "exact", flipped):
        assert off_by(q, k, k, structure=pa.Mask(KEEP)) > 0.1
    assert off_by(q, k, k, structure=pa.Mask(KEEP)) < 4e-3


def scene_a_mask_that_the_op_would_have_to_broadcast() -> None:
    q, k = drawn(2, 5, 4, 32), drawn(2, 7, 4, 32)
    exact = mindie_forward.exact

    def unexpanded(mask: torch.Tensor, *given: Any) -> Any:
        return exact(mask, *given)._replace(keep=mask)

    with mock.patch.object(mindie_forward, "exact", unexpanded), pytest.raises(RuntimeError, match="561103"):
        off_by(q, k, k, structure=pa.Mask(KEEP))


def scene_a_mask_without_its_fully_masked_rows() -> None:
    q, k = drawn(1, 2, 4, 32), drawn(1, 7, 4, 32)
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1] = False
    exact = mindie_forward.exact

    def unaware(*given: Any) -> Any:
        shaped = exact(*given)
        return shaped._replace(fully_masked=torch.zeros_like(shaped.fully_masked))

    with mock.patch.object(mindie_forward, "exact", unaware):
        assert off_by(q, k, k, structure=pa.Mask.pairs(keep)) > 0.1  # the mean of V


def scene_a_scale_that_is_left_out_or_no_float() -> None:
    from mindiesd.utils.exception import ParametersInvalid

    q = drawn(1, 5, 4, 32)
    real = mindie_forward.package()

    class Dropping:
        @staticmethod
        def attention_forward(*given: Any, scale: float, **how: Any) -> torch.Tensor:
            return real.attention_forward(*given, **how)

    class Integers:
        @staticmethod
        def attention_forward(*given: Any, scale: float, **how: Any) -> torch.Tensor:
            return real.attention_forward(*given, scale=int(scale), **how)

    with mock.patch.object(mindie_forward, "package", Dropping):
        assert off_by(q, q, q, scale=1.0) > 0.1
    with mock.patch.object(mindie_forward, "package", Integers), pytest.raises(ParametersInvalid, match="scale"):
        off_by(q, q, q, scale=1.0)


def scene_boundaries_as_a_device_tensor_or_without_the_leading_zero() -> None:
    q = drawn(9, 4, 32)
    documents = pa.Packed.from_lengths([4, 5])
    real = mindie_packed.package()

    class OnDevice:
        @staticmethod
        def attention_forward_varlen(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, **how: Any) -> torch.Tensor:
            return real.attention_forward_varlen(q, k, v, ends_q, torch.tensor(ends_k, dtype=torch.int32).npu(), **how)

    class WithoutZero:
        @staticmethod
        def attention_forward_varlen(q: Any, k: Any, v: Any, ends_q: Any, ends_k: Any, **how: Any) -> torch.Tensor:
            return real.attention_forward_varlen(q, k, v, ends_q[1:], ends_k[1:], **how)

    with mock.patch.object(mindie_packed, "package", return_value=OnDevice), pytest.raises((RuntimeError, TypeError)):
        off_by(q, q, q, structure=documents)
    with mock.patch.object(mindie_packed, "package", return_value=WithoutZero):
        assert not off_by(q, q, q, structure=pa.Packed.from_lengths([4, 5])) < 0.1


def scene_outliers_in_laser() -> None:
    from tests.emulators.npu.stack import LintError

    q, v = drawn(1, 2048, 1, 64).bfloat16() * 256, drawn(1, 2048, 1, 64).bfloat16()
    loud = {"scale": 1e-6, "backend": "laser", "options": NpuOptions(laser_max_abs=1300.0)}
    assert off_by(q, q, v, **loud) < 2e-2
    with mock.patch.object(laser_forward, "input_scale", return_value=1), pytest.raises(LintError, match="float16"):
        off_by(q, q, v, **loud)


@pytest.mark.parametrize("scene", scenes_of(globals()))
def test_breach(scene: str) -> None:
    passed(__name__, scene, soc="A2", lint=True)
