"""How blocks are chosen: exactly the highest scores, whatever their range, the lowest index first among equals."""

from __future__ import annotations

import math

import pytest
import torch

from polyattn.kernels.video_select import choose, pooled, score, select

INF = math.inf


def _wanted(row: list[float], kept: int) -> list[int]:
    """Indices of the highest of one row; NaN is -inf."""
    clean = [-INF if math.isnan(value) else value for value in row]
    return sorted(sorted(range(len(clean)), key=lambda place: (-clean[place], place))[:kept])


ROWS = {
    "plain": [0.5, -1.0, 3.0, 2.0, -4.0, 0.1, 7.0],
    "ties": [1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 0.0],
    "all equal": [3.0] * 7,
    "zeros of both signs": [-0.0, 0.0, -1.0, 0.0, -0.0, -2.0, 0.0],
    "one far below": [1.0, 1.0 + 2.0**-23, -1e30, 1.0 - 2.0**-24, 1.5, 1.0, 0.9],
    "far apart": [1e38, -1e38, 1e-38, -1e-38, 1e-45, -1e-45, 0.0],
    "infinities": [-INF, INF, -INF, 0.0, INF, -INF, -3e38],
    "nothing finite": [-INF] * 7,
    "nan": [math.nan, 1.0, math.nan, -INF, 2.0, -1.0, math.nan],
    "negative": [-5.0, -3.0, -4.0, -3.0, -9.0, -3.5, -8.0],
}


@pytest.mark.parametrize("row", ROWS)
def test_the_highest_are_kept(device: str, row: str) -> None:
    values = ROWS[row]
    scores = torch.tensor(values, device=device).expand(1, 1, 7, 7).contiguous()
    for kept in (1, 2, 3, 5, 6):
        lists, counts = choose(scores, prefix=0, kept=kept)
        assert lists[0, 0].tolist() == [_wanted(values, kept)] * 7
        assert counts.tolist() == [[[kept] * 7]]


def test_segments_before_are_kept_beside_the_highest(device: str) -> None:
    scores = torch.randn(2, 2, 9, 9, generator=torch.Generator().manual_seed(0)).to(device)
    lists, counts = choose(scores, prefix=3, kept=2)
    assert lists.shape == (2, 2, 9, 5)
    for sample in range(2):
        for head in range(2):
            for row in range(3, 9):
                best = _wanted(scores[sample, head, row, 3:].tolist(), 2)
                assert lists[sample, head, row].tolist() == [0, 1, 2, *(3 + place for place in best)]
    assert bool((counts[:, :, 3:] == 5).all())


@pytest.mark.parametrize("blocks", [17, 64, 100])
def test_many_blocks(device: str, blocks: int) -> None:
    scores = torch.randint(-3, 4, (1, 1, blocks, blocks), generator=torch.Generator().manual_seed(blocks))
    lists, _ = choose(scores.float().to(device), prefix=1, kept=blocks // 3)
    for row in (1, blocks // 2, blocks - 1):
        best = _wanted(scores[0, 0, row, 1:].tolist(), blocks // 3)
        assert lists[0, 0, row].tolist() == [0, *(1 + place for place in best)]


def test_means_and_scores(device: str, dtypes: tuple[torch.dtype, ...]) -> None:
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    starts = torch.tensor([0, 1, 40, 43, 50], dtype=torch.int32, device=device)
    for dtype in dtypes:
        x = torch.randn(2, 55, 3, 20, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        means = pooled(x, order, starts)
        rows = x.cpu().double()[:, order.cpu().long()]
        want = torch.stack([part.mean(dim=1) for part in rows.split([1, 39, 3, 7], dim=1)], dim=2)
        torch.testing.assert_close(means.cpu().double(), want, atol=1e-6, rtol=0)
        scores, coarse = score(means, means, means, scale=-0.7, need_scores=True)
        assert scores is not None
        assert coarse is not None
        product = want @ want.transpose(-1, -2)
        torch.testing.assert_close(scores.cpu().double(), -product, atol=1e-5, rtol=0)
        torch.testing.assert_close(coarse.cpu().double(), (-0.7 * product).softmax(dim=-1) @ want, atol=1e-5, rtol=0)


def test_nothing_is_scored_where_everything_is_kept(device: str) -> None:
    q = torch.zeros(1, 4, 1, 16, device=device)
    order = torch.arange(4, dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2, 4], dtype=torch.int32, device=device)
    assert select(q, q, None, order, starts, prefix=0, kept=2, scale=1.0) == (None, None, None)
    chosen = select(q, q, q, order, starts, prefix=1, kept=1, scale=1.0)
    assert chosen.lists is None
    assert chosen.coarse is not None
