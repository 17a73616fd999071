"""Additive masks on a device: in npu:fusion's `pse` only what the range and the digits of q's dtype can hold counts."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.on_device.here import assert_near, assert_right, exact, qkv, record

pytestmark = pytest.mark.npu

HALVES = pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
def test_a_bias_is_divided_by_the_scale_and_hides_by_the_mask(monkeypatch, scale: float) -> None:
    asked = record(monkeypatch)
    bias = torch.randn(1, 1, 5, 7, generator=torch.Generator().manual_seed(0))
    bias[0, 0, 1, 2] = float("-inf")
    bias[0, 0, 2] = torch.finfo(torch.float32).min
    assert_right("fusion", *qkv((2, 5), (2, 7)), structure=pa.Mask(bias), scale=scale)
    (call,) = asked
    assert (tuple(call["pse"].shape), call["pse"].dtype) == ((1, 4, 5, 7), torch.float16)
    assert bool(call["pse"].isfinite().all())
    assert torch.equal(call["atten_mask"].cpu(), bias <= torch.finfo(torch.float32).min)
    assert call["scale"] == pytest.approx(1.2 if scale else 1.0), "a power of two of it is in q"


@pytest.mark.parametrize(
    ("entries", "scale"), [((-9000.0, -10000.0, -11000.0, -12000.0), None), ((-100.0, -70.0, -90.0, -80.0), 1e-3)]
)
def test_a_float16_bias_is_never_divided_beyond_its_range(entries: tuple[float, ...], scale: float | None) -> None:
    assert_right("fusion", *qkv((1, 5), (1, 4)), structure=pa.Mask(torch.tensor(entries).half()), scale=scale)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("scale", [1e-20, 2.0**-130, -1e-40, 5e-324])
def test_a_bias_counts_at_a_scale_that_leaves_nothing_of_the_scores(dtype: torch.dtype, scale: float) -> None:
    bias = torch.tensor([-3.0, float("-inf"), 1001.0, 1000.0])
    assert_right("fusion", *qkv((2, 5), (2, 4), dtype=dtype), structure=pa.Mask(bias), scale=scale)


#: Float32 entries that are no float16, or of which float16 and bfloat16 make one number.
BEYOND = {
    "below": (-70000.0, -70001.0, -70002.0, -69999.5),
    "above": (70000.0, 70001.0, 70002.0, 69999.5),
    "both": (-70000.0, 70000.0, 70001.0, 0.0),
    "digits": (-300.0, -300.4, -301.0, -299.8),
    "far": (3e5, 0.0, -3e5, 299999.0),
}


@HALVES
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("named", BEYOND)
def test_a_float32_bias_counts_with_its_own_range_and_digits(dtype: torch.dtype, causal: bool, named: str) -> None:
    bias = torch.tensor(BEYOND[named])
    assert_right("fusion", *qkv((2, 4), dtype=dtype), structure=pa.Mask(bias), causal=causal)


@HALVES
def test_each_row_has_a_largest_entry_of_its_own(dtype: torch.dtype) -> None:
    rows = torch.tensor([-1e5, 1e5, -70000.0, 0.0, 3e4])[:, None]
    bias = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(0)) + rows
    bias[1, 2, 3] = float("-inf")
    bias[0, :, 1, 2:] = torch.finfo(torch.float32).min
    assert_right("fusion", *qkv((2, 5), (2, 7), dtype=dtype), structure=pa.Mask(bias))


def test_what_lies_far_below_a_row_s_largest_entry_is_the_least_that_q_s_dtype_has(monkeypatch) -> None:
    asked = record(monkeypatch)
    bias = torch.zeros(1, 1, 5, 7)
    bias[..., 0], bias[..., 1] = 3e5, -3e5
    assert_right("fusion", *qkv((2, 5), (2, 7)), structure=pa.Mask(bias), scale=0.3)
    assert asked[0]["pse"][..., 0].cpu().eq(0).all()
    assert asked[0]["pse"][..., 1:].cpu().eq(-65504).all()


def test_the_least_finite_entry_of_the_mask_s_own_dtype_hides_and_of_another_does_not() -> None:
    q, k, v = qkv((1, 4))
    least = torch.finfo(torch.float16).min
    k[:, 0] = 0.0
    hides = pa.Mask(torch.tensor([least, 0.0, 0.0, 0.0]).half())
    alone = pa.Mask(torch.tensor([least, least - 9, least - 9, least - 9]))
    out = assert_right("fusion", q, k, v, structure=hides)
    assert_near(out, exact(q, k[:, 1:], v[:, 1:]))
    assert_right("fusion", q, k, v, structure=alone)


@pytest.mark.parametrize("named", ["below", "above"])
@pytest.mark.parametrize("choice", ["auto", "-fusion,auto", "blocked"])
def test_other_routes_have_the_same_answer(choice: str, named: str) -> None:
    q, k, v = qkv((2, 4))
    mask = pa.Mask(torch.tensor(BEYOND[named]))
    assert_near(pa.attention(q, k, v, structure=mask, backend=choice), exact(q, k, v, structure=mask))
