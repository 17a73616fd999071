"""VideoLayout, VideoTiles, BlockMap: what they accept, and how many tiles are kept."""

import pytest
import torch

import polyattn as pa

GRID = pa.VideoLayout((5, 5, 5))  # 8 tiles of (4, 4, 4), most of them partial


@pytest.mark.parametrize(("kept", "by"), [
    (8, {"sparsity": 0}), (4, {"sparsity": 0.5}), (1, {"sparsity": 0.9}), (1, {"sparsity": 1.0}),
    (8, {"topk": 8}), (8, {"topk": 64}), (3, {"topk": 3}),
])  # fmt: skip
def test_kept_tiles_count_partial_ones_and_are_clamped(kept, by):
    tiles = pa.VideoTiles(GRID, (4, 4, 4), **by)
    assert (tiles.num_tiles, tiles.kept) == (8, kept)


def test_a_share_that_is_whole_is_not_rounded_up():
    ten = pa.VideoLayout((10, 1, 1))
    assert [pa.VideoTiles(ten, (1, 1, 1), sparsity=s / 10).kept for s in range(11)] == [
        10,
        9,
        8,
        7,
        6,
        5,
        4,
        3,
        2,
        1,
        1,
    ]


def test_prefix_rows_are_not_among_the_tiles():
    layout = pa.VideoLayout((4, 8, 8), prefix=(70, 10))
    assert layout.tokens == 336
    assert pa.VideoTiles(layout, (4, 4, 4), sparsity=0.5).num_tiles == 4


@pytest.mark.parametrize(("make", "error", "words"), [
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), topk=0), ValueError, "topk: at least 1.*0"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), topk=-1), ValueError, "topk: at least 1.*-1"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), topk=1.5), TypeError, "topk"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), topk=True), TypeError, "topk"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), sparsity=1.5), ValueError, "sparsity"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), sparsity=float("nan")), ValueError, "sparsity"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), sparsity="0.5"), TypeError, "sparsity"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4)), ValueError, "topk, sparsity: exactly one"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), topk=1, sparsity=0.5), ValueError, "topk, sparsity: exactly one"),
    (lambda: pa.VideoTiles(GRID, 4, topk=1), TypeError, "tile: .*time, height, width.*4"),
    (lambda: pa.VideoTiles(GRID, (4, 4), topk=1), ValueError, "tile: three sizes"),
    (lambda: pa.VideoTiles(GRID, (4, 0, 4), topk=1), ValueError, "tile: at least 1"),
    (lambda: pa.VideoTiles((5, 5, 5), (4, 4, 4), topk=1), TypeError, "layout: a VideoLayout"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), topk=1, fallback="sdpa"), ValueError, "fallback: .*'dense'.*'sdpa'"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), topk=1, min_seq_len=-1), ValueError, "min_seq_len"),
    (lambda: pa.VideoTiles(GRID, (4, 4, 4), topk=1, keep_sparse_numerics=1), TypeError, "keep_sparse_numerics"),
    (lambda: pa.VideoLayout((5, 5)), ValueError, "grid: three sizes"),
    (lambda: pa.VideoLayout((5, 0, 5)), ValueError, "grid: at least 1"),
    (lambda: pa.VideoLayout((5.0, 5, 5)), TypeError, "grid: integers"),
    (lambda: pa.VideoLayout((5, 5, 5), prefix=(0,)), ValueError, "prefix: at least 1"),
    (lambda: pa.VideoLayout((5, 5, 5), prefix=4), TypeError, "prefix"),
    (lambda: pa.VideoLayout((5, 5, 5), prefix=(4,), start=3), ValueError, "start: .*4 rows, got 3"),
    (lambda: pa.VideoLayout((5, 5, 5), used=124), ValueError, "used: .*125.*124"),
    (lambda: pa.VideoLayout((5, 5, 5), used=True), TypeError, "used"),
])  # fmt: skip
def test_what_cannot_be_is_refused_by_name(make, error, words):
    with pytest.raises(error, match=words):
        make()


@pytest.mark.parametrize(("layout", "queries", "keys", "words"), [
    (GRID, 124, 124, "layout: 125 rows .*S=124"),
    (GRID, 126, 126, "layout: 125 rows .*S=126"),
    (GRID, 125, 124, "layout: .*S=125 and k S=124"),
    (pa.VideoLayout((5, 5, 5), used=130), 129, 129, "layout: 130 rows .*S=129"),
])  # fmt: skip
def test_the_rows_are_those_of_the_layout(layout, queries, keys, words):
    with pytest.raises(ValueError, match=words):
        pa.VideoTiles(layout, (4, 4, 4), topk=1).check((1, queries, 2, 8), (1, keys, 2, 8))


def test_rows_past_the_used_ones_are_padding():
    pa.VideoTiles(pa.VideoLayout((5, 5, 5), used=130), (4, 4, 4), topk=1).check((1, 140, 2, 8), (1, 140, 2, 8))
    pa.VideoTiles(pa.VideoLayout((5, 5, 5), prefix=(3,), start=5), (4, 4, 4), topk=1).check(
        (1, 130, 2, 8), (1, 130, 2, 8)
    )


LISTS, COUNTS = [[[[0, 2, -1], [1, 9, 9]]]], [[[2, 1]]]


def test_a_block_map_is_copied_from_the_host():
    lists, counts = torch.tensor(LISTS, dtype=torch.int32), torch.tensor(COUNTS, dtype=torch.int32)
    block_map = pa.BlockMap(lists, counts, 4, 4, [4, 4, 2])
    lists.zero_()
    counts.zero_()
    assert (block_map.lists.tolist(), block_map.counts.tolist()) == (LISTS, COUNTS)
    assert block_map.sizes.tolist() == [4, 4, 2]
    block_map.check((2, 8, 3, 8), (2, 12, 3, 8))


@pytest.mark.parametrize(("change", "error", "words"), [
    ({"lists": torch.zeros(1, 1, 2, 3)}, TypeError, "lists: .*float32"),
    ({"lists": [[[0, 2]]]}, ValueError, r"lists: shape \[B\|1, H\|1, Nq, K\]"),
    ({"counts": [[[2]]]}, ValueError, r"counts: shape \[1, 1, 2\]"),
    ({"counts": [[[4, 1]]]}, ValueError, "counts: 0 to 3"),
    ({"counts": [[[-1, 1]]]}, ValueError, "counts: 0 to 3"),
    ({"counts": [[[3, 1]]]}, ValueError, "lists: .*negative.*-1"),
    ({"lists": [[[[2, 2, -1], [1, 9, 9]]]]}, ValueError, "lists: .*2 twice"),
    ({"block_q": 0}, ValueError, "block_q: at least 1"),
    ({"block_k": 4.0}, TypeError, "block_k"),
    ({"block_q": (4, 4, 4)}, TypeError, r"block_q: integers are needed, got tuple \(4, 4, 4\)"),
    ({"sizes": [4, 5, 1]}, ValueError, "sizes: 0 to block_k=4"),
])  # fmt: skip
def test_a_malformed_block_map_is_refused(change, error, words):
    with pytest.raises(error, match=words):
        pa.BlockMap(**({"lists": LISTS, "counts": COUNTS, "block_q": 4, "block_k": 4} | change))


@pytest.mark.parametrize(("q_shape", "k_shape", "words"), [
    ((1, 9, 1, 8), (1, 12, 1, 8), "lists: 3 query blocks are needed for Sq=9, got 2"),
    ((1, 8, 1, 8), (1, 8, 1, 8), "lists: key block 2 is named, but Sk=8 has 2 blocks"),
    ((1, 8, 1, 8), (1, 16, 1, 8), "sizes: .*3 for 4 blocks"),
])  # fmt: skip
def test_a_block_map_fits_its_tensors(q_shape, k_shape, words):
    with pytest.raises(ValueError, match=words):
        pa.BlockMap(LISTS, COUNTS, 4, 4, [4, 4, 2]).check(q_shape, k_shape)


def test_a_block_map_of_other_batches_or_heads_is_refused():
    wide = pa.BlockMap(torch.zeros(2, 3, 2, 1, dtype=torch.int64), torch.ones(2, 3, 2, dtype=torch.int64), 4, 4)
    wide.check((2, 8, 3, 8), (2, 8, 3, 8))
    for batch, heads, axis in ((3, 3, "B"), (2, 6, "H")):
        with pytest.raises(ValueError, match=f"lists: axis {axis}"):
            wide.check((batch, 8, heads, 8), (batch, 8, heads, 8))
