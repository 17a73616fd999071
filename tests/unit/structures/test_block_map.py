"""BlockMap from one truth value a pair of blocks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyattn as pa


@given(st.integers(0, 2**32), st.sampled_from([(3, 5), (1, 1, 4, 4), (2, 3, 2, 6)]), st.floats(0, 1))
def test_the_lists_hold_the_kept_blocks_in_order_and_no_others(seed, shape, density):
    kept = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < density
    made = pa.BlockMap.from_mask(kept, 16, 32)
    rows = kept.reshape(-1, shape[-1])
    lists = made.lists.reshape(len(rows), -1)
    assert made.counts.shape == kept.expand(*(1,) * (4 - kept.dim()), *shape).shape[:3]
    for row, listed, count in zip(rows, lists, made.counts.flatten(), strict=True):
        assert listed[:count].tolist() == row.nonzero().flatten().tolist()


@pytest.mark.parametrize("shape", [(4,), (2, 4, 4), (1, 1, 1, 4, 4)])
def test_a_map_of_another_rank_is_refused_with_its_shape(shape):
    with pytest.raises(ValueError, match=r"\[Nq,Nk\] or \[B\|1,H\|1,Nq,Nk\] is needed, got shape"):
        pa.BlockMap.from_mask(torch.ones(shape), 16, 16)


def test_numbers_other_than_zero_keep():
    assert pa.BlockMap.from_mask([[0, 2], [-1, 0]], 8, 8).lists.tolist() == [[[[1], [0]]]]
