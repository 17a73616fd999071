"""Partial attentions merge into the whole: any chunks, any order, infinities, float32 whatever the dtype."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise, permutations
from math import inf, log

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import polyattn as pa
from polyattn.distributed.merge import Partial, merge_into, merged, nothing_seen
from tests.distributed.counting import Allocations


def partial(value: float, lse: float) -> Partial:
    return torch.full((1, 1, 1, 1), value, dtype=torch.bfloat16), torch.full((1, 1, 1), lse)


# fault_cases row 32
@pytest.mark.parametrize(
    ("first", "second", "value", "lse"),
    [
        ((1.0, 0.0), (3.0, 200.0), 3.0, 200.0),
        ((0.0, -inf), (7.0, 0.5), 7.0, 0.5),
        ((0.0, -inf), (0.0, -inf), 0.0, -inf),
        ((0.0, log(1)), (4.0, log(3)), 3.0, 1.3863),
    ],
)
def test_two_partials_in_both_orders(
    first: tuple[float, float], second: tuple[float, float], value: float, lse: float
) -> None:
    for one, other in permutations((first, second)):
        out, total = merged(partial(*one), partial(*other))
        assert (out.dtype, total.dtype) == (torch.float32, torch.float32)
        assert out.item() == pytest.approx(value, abs=1e-6)
        assert total.item() == pytest.approx(lse, abs=1e-4)
        in_place = tuple(part.float() for part in partial(*one))
        merge_into(in_place, partial(*other), (0, 1), (0, 1))
        assert torch.equal(in_place[0], out)
        assert torch.equal(in_place[1], total)


def test_an_lse_of_another_layout_is_refused_with_both_shapes() -> None:
    out = torch.zeros(1, 3, 2, 4)  # [B,S,H,D]
    with pytest.raises(ValueError) as caught:
        merged((out, torch.zeros(1, 3, 2)), (out, torch.zeros(1, 2, 3)))
    assert "[1, 2, 3]" in str(caught.value)
    assert "[1, 3, 2]" in str(caught.value)


def pieces(dtype: torch.dtype, bounds: list[int], hidden: set[int]) -> tuple[list[Partial], Partial]:
    """One partial attention a chunk of keys, some of them wholly hidden, and the attention over all, in float64."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, rows, 3, 8, generator=random, dtype=torch.float64).to(dtype) for rows in (5, 64, 64))
    keep = torch.ones(2, 64, dtype=torch.bool)
    for start in hidden:
        keep[0, start : start + 9] = False
    cuts = list(pairwise(bounds))
    found = [
        pa.attention(
            q, k[:, a:b], v[:, a:b], structure=pa.KeyPadding.from_mask(keep[:, a:b], queries="all"), return_lse=True
        )
        for a, b in cuts
    ]
    whole = pa.reference_attention(q, k, v, structure=pa.KeyPadding.from_mask(keep, queries="all"), return_lse=True)
    return found, whole


@settings(max_examples=60, deadline=None)
@given(
    st.sets(st.integers(1, 63), max_size=9), st.sets(st.integers(0, 60), max_size=4), st.randoms(use_true_random=False)
)
def test_any_chunks_in_any_order_and_grouping_are_the_whole(cuts: set[int], hidden: set[int], random: object) -> None:
    parts, (out, lse) = pieces(torch.float32, [0, *sorted(cuts), 64], hidden)
    random.shuffle(parts)  # type: ignore[attr-defined]
    while len(parts) > 1:  # neighbours first, then what they made: another grouping than from left to right
        place = random.randrange(len(parts) - 1)  # type: ignore[attr-defined]
        parts[place : place + 2] = [merged(parts[place], parts[place + 1])]
    torch.testing.assert_close(parts[0][0].double(), out, rtol=0, atol=1e-6)
    torch.testing.assert_close(parts[0][1].double(), lse, rtol=0, atol=2e-6)


def test_eight_chunks_of_bfloat16_lose_nothing_on_the_way() -> None:
    parts, (out, _) = pieces(torch.bfloat16, list(range(0, 65, 8)), set())
    got = reduce(merged, parts)[0]
    assert (got.double() - out).abs().max() < 1e-2


def test_in_place_is_the_same_for_some_rows_of_some_samples() -> None:
    parts, _ = pieces(torch.float32, [0, 20, 64], {3})
    out, lse = nothing_seen(torch.zeros(2, 5, 3, 8), 8)
    for part_out, part_lse in parts:
        merge_into((out, lse), (part_out[1:, 2:4], part_lse[1:, :, 2:4]), rows=(2, 4), batch=(1, 2))
    want, want_lse = reduce(merged, parts)
    torch.testing.assert_close(out[1:, 2:4], want[1:, 2:4])
    torch.testing.assert_close(lse[1:, :, 2:4], want_lse[1:, :, 2:4])
    assert not out[0].any()
    assert not out[1, :2].any()
    assert bool((lse[0] == -inf).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_makes_nothing_of_the_output_s_size(dtype: torch.dtype) -> None:
    total = nothing_seen(torch.zeros(1, 64, 4, 32), 32)
    part = torch.randn(1, 64, 4, 32, dtype=dtype), torch.randn(1, 4, 64)
    with Allocations() as allocations:
        merge_into(total, part, (0, 64), (0, 1))
    assert 0 < allocations.peak < total[0].nbytes / 2


def test_gradients_are_finite_where_a_side_or_both_saw_nothing() -> None:
    out = torch.randn(1, 3, 1, 4, dtype=torch.float64, requires_grad=True)
    lse = torch.tensor([[[0.3, -inf, -inf]]], requires_grad=True)
    other = torch.randn(1, 3, 1, 4, dtype=torch.float64), torch.tensor([[[1.0, 2.0, -inf]]])
    total, total_lse = merged((out, lse), other)
    (total.sum() + total_lse[..., :2].sum()).backward()
    assert out.grad is not None
    assert lse.grad is not None
    assert bool(out.grad.isfinite().all())
    assert bool(lse.grad.isfinite().all())
