"""VideoTilesMeta: tile order, blocks that never span two segments, tables shared by all structures of a layout."""

from __future__ import annotations

import time
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyattn as pa
from polyattn.structures.video_meta import VideoTilesMeta

CPU = torch.device("cpu")


def bound(layout: pa.VideoLayout, tile: tuple[int, int, int], rows: int | None = None, **by: object) -> VideoTilesMeta:
    shape = (1, layout.rows if rows is None else rows, 2, 8)
    return pa.VideoTiles(layout, tile, **(by or {"topk": 1})).bind(CPU, shape, shape)


def test_a_grid_of_two_tiles_by_hand():
    meta = bound(pa.VideoLayout((1, 2, 5)), (1, 2, 3))
    assert meta.order.tolist() == [0, 1, 2, 5, 6, 7, 3, 4, 8, 9]
    assert meta.starts.tolist() == [0, 6, 10]
    assert meta.tile_of.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert (meta.sizes, meta.prefix_blocks, meta.video_blocks, meta.used) == ((6, 4), 0, 2, 10)
    assert {t.dtype for t in (meta.order, meta.starts, meta.tile_of)} == {torch.int32}


def test_segments_come_first_in_chunks_of_a_tile_and_one_remainder():
    layout = pa.VideoLayout((1, 2, 2), prefix=(5, 4, 1), used=16)
    meta = bound(layout, (1, 2, 2), rows=18)
    assert layout.segments == ((0, 5), (5, 9), (9, 10), (14, 16))  # the last: tokens after the video
    assert meta.sizes == (4, 1, 4, 1, 2, 4)
    assert meta.order.tolist() == [*range(10), 14, 15, 10, 11, 12, 13, 16, 17]
    assert meta.tile_of.tolist() == [0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 5, 5, 5, 5, 4, 4, -1, -1]
    assert (meta.prefix_blocks, meta.video_blocks, meta.used, meta.prefix_rows) == (5, 1, 16, 12)


def test_rows_between_the_prefix_and_the_video_are_a_segment():
    layout = pa.VideoLayout((1, 1, 2), prefix=(1,), start=3)
    assert layout.segments == ((0, 1), (1, 3))
    assert bound(layout, (1, 1, 2)).sizes == (1, 2, 2)


GRIDS = [(5, 5, 5), (3, 5, 7), (1, 1, 1), (4, 4, 4), (1, 9, 4), (2, 3, 13)]


@pytest.mark.parametrize(("grid", "tile"), [*product(GRIDS, [(4, 4, 4), (2, 3, 5), (1, 1, 1), (8, 1, 2)])])
def test_every_token_is_in_the_tile_of_its_coordinates(grid, tile):
    layout = pa.VideoLayout(grid, prefix=(3,))
    meta = bound(layout, tile)
    across = [-(-size // edge) for size, edge in zip(grid, tile, strict=True)]
    for row, (t, h, w) in enumerate(product(*map(range, grid)), start=3):
        number = (t // tile[0] * across[1] + h // tile[1]) * across[2] + w // tile[2]
        assert meta.tile_of[row] == meta.prefix_blocks + number
    assert meta.order.sort().values.tolist() == list(range(layout.rows))
    for block in range(meta.blocks):
        rows = meta.order[meta.starts[block] : meta.starts[block + 1]]
        assert (meta.tile_of[rows] == block).all()
        assert (rows.diff() > 0).all()
    assert tuple(meta.starts.diff().tolist()) == meta.sizes


def test_structures_of_one_layout_share_the_tables():
    layout = pa.VideoLayout((5, 6, 7), prefix=(2,))
    first, second = bound(layout, (2, 2, 2), topk=1), bound(pa.VideoLayout((5, 6, 7), (2,)), (2, 2, 2), sparsity=0.5)
    assert first.order is second.order
    assert first.tile_of is second.tile_of
    assert (first.kept, second.kept) == (1, 18)


def test_a_gate_rides_on_the_same_tables():
    meta = bound(pa.VideoLayout((2, 2, 2)), (2, 2, 2))
    gate = torch.ones(1)
    weighted = meta.with_gate(gate)
    assert weighted.gate is gate
    assert meta.gate is None
    assert weighted.order is meta.order
    assert vars(weighted)["_derived"] is vars(meta)["_derived"]


def test_it_is_frozen():
    meta = bound(pa.VideoLayout((2, 2, 2)), (2, 2, 2))
    with pytest.raises(AttributeError):
        meta.kept = 2  # type: ignore[misc]


def test_sending_ahead_is_enough_and_is_done_once():
    tiles = pa.VideoTiles(pa.VideoLayout((2, 3, 4)), (2, 2, 2), topk=1)
    tiles.to("cpu")
    tiles.bind(CPU, (1, 24, 2, 8), (1, 24, 2, 8))
    tiles.bind(CPU, (4, 24, 2, 8), (4, 24, 2, 8))
    assert tiles.builds == 1


def test_no_shape_depends_on_what_a_tensor_holds():
    with FakeTensorMode():
        meta = bound(pa.VideoLayout((3, 5, 11), prefix=(7,)), (2, 2, 2))
    assert (meta.order.shape, meta.starts.shape) == ((172,), (2 * 3 * 6 + 1 + 1,))
    assert type(bound(pa.VideoLayout((3, 5, 11), prefix=(7,)), (2, 2, 2)).order) is torch.Tensor


def test_a_layout_of_75600_tokens_takes_milliseconds():
    taken, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)  # several threads wait for each other wherever other processes keep a core busy
    try:
        for prefix in range(1, 8):  # layouts that no other test has built
            layout = pa.VideoLayout((21, 45, 80), prefix=(prefix,))
            start = time.perf_counter()
            bound(layout, (4, 4, 4), sparsity=0.9)
            taken.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    assert min(taken) < 0.02
