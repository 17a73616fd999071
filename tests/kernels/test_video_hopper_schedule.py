"""The Hopper kernel's own text, run on a processor against the reference: without a GPU nothing else runs Gluon."""

from __future__ import annotations

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polyattn.kernels import video_hopper
from polyattn.kernels.video_fine import Blocks, Coarse, Listed
from polyattn.kernels.video_tiles import _HOPPER, HopperTile
from tests.kernels.gluon_threads import PANEL, launch


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_hopper, "launch", launch)


def _descriptor_as_it_is(rows: torch.Tensor, box: int) -> Any:
    return SimpleNamespace(
        base=rows, shape=[rows.numel() // 128, 128], block_shape=[box, PANEL], dtype=rows.dtype, layout=None
    )


@pytest.fixture(autouse=True)
def _described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(video_hopper, "described", _descriptor_as_it_is)


#: Sizes of the blocks of a sequence, of which the first `every` are dense rows.
SIZES = {
    "whole and partial": ([256, 256, 160, 64, 40, 1], 0),
    "dense rows": ([100, 256, 37, 129], 1),
}
TILES = {
    "one group": _HOPPER[1],
    "two groups": _HOPPER[2],
    "boxes of a step": HopperTile(2, 64, 64, 2),
    "two stages": HopperTile(2, 64, 128, 2),
    "one group, two stages": HopperTile(1, 32, 128, 2),
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("sizes", SIZES)
def test_it_is_attention_of_the_listed_blocks(sizes: str, tile: str) -> None:
    rows, every = SIZES[sizes]
    generator = torch.Generator().manual_seed(len(tile))
    used, heads, kv_heads, number = sum(rows), 2, 1, len(rows)
    samples = 2 if every else 1
    order = torch.randperm(used, generator=generator).int()
    q, k, v, gate = (
        torch.randn(samples, used + 5, size, 128, generator=generator).half()
        for size in (heads, kv_heads, kv_heads, heads)
    )
    ends = torch.tensor(rows).cumsum(0).int()
    blocks = Blocks(ends - torch.tensor(rows).int(), ends, max(rows), order)
    lists = torch.rand(samples, heads, number, number, generator=generator).argsort(dim=-1).int()
    counts = torch.randint(1, number + 1, (samples, heads, number), generator=generator).int()
    counts[0, 0, number - 1] = 0
    coarse = torch.randn(samples, heads, number, 128, generator=generator)
    out = torch.full_like(q, math.nan)
    lse = torch.full((samples, heads, used + 5), math.nan)
    video_hopper.listed_attention_hopper(
        q, k, v, out, lse, blocks, blocks, Listed(lists, counts, used, every), TILES[tile],
        scale=-0.1, coarse=Coarse(gate, coarse),
    )  # fmt: skip
    for sample, head in product(range(samples), range(heads)):
        for block in range(number):
            mine = order[blocks.starts[block] : blocks.ends[block]].long()
            listed = (
                range(number) if block < every else lists[sample, head, block, : counts[sample, head, block]].tolist()
            )
            keys = torch.cat([order[blocks.starts[one] : blocks.ends[one]] for one in listed] or [order[:0]]).long()
            scores = -0.1 * q[sample, mine, head].double() @ k[sample, keys, 0].double().T
            want = scores.softmax(-1) @ v[sample, keys, 0].double() if len(keys) else torch.zeros(len(mine), 128)
            want = want + gate[sample, mine, head].double() * coarse[sample, head, block].double()
            torch.testing.assert_close(out[sample, mine, head].double(), want.double(), atol=4e-3, rtol=2e-3)
            torch.testing.assert_close(lse[sample, head, mine].double(), scores.logsumexp(-1), atol=1e-3, rtol=0)
    assert bool(out[:, used:].isnan().all())


@pytest.mark.parametrize("tile", ["one group", "two groups"])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_what_another_head_or_sample_holds_is_not_read(every: int, tile: str) -> None:
    """A step that is not full copies rows behind the last key, and multiplies them by 0: they are no other head's."""
    rows = [100, 37, 64]
    used, number = sum(rows), len(rows)
    order = torch.randperm(used, generator=torch.Generator().manual_seed(every)).int()
    ends = torch.tensor(rows).cumsum(0).int()
    blocks = Blocks(ends - torch.tensor(rows).int(), ends, max(rows), order)
    lists = torch.tensor([[2, 0], [2, 1], [1, 2]]).int().expand(1, 1, number, 2)
    counts = torch.tensor([1, 2, 2]).int().expand(1, 1, number)
    listed = Listed(None, None, used, every) if every == number else Listed(lists, counts, used, every)
    q, k, v = (torch.randn(2, used, 2, 128, generator=torch.Generator().manual_seed(seed)).half() for seed in range(3))

    def answer() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full_like(q, math.nan), torch.full((2, 2, used), math.nan)
        video_hopper.listed_attention_hopper(q, k, v, out, lse, blocks, blocks, listed, TILES[tile], scale=0.1)
        return out, lse

    out, lse = answer()
    for sample, head in product(range(2), range(2)):
        k, v = torch.full_like(k, math.nan), torch.full_like(v, math.inf)
        for tensor, seed in ((k, 1), (v, 2)):
            whole = torch.randn(2, used, 2, 128, generator=torch.Generator().manual_seed(seed)).half()
            tensor[sample, :, head] = whole[sample, :, head]
        got, got_lse = answer()
        assert torch.equal(got[sample, :, head], out[sample, :, head])
        assert torch.equal(got_lse[sample, head], lse[sample, head])
