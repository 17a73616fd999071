"""The table of video tiles: what it names can be launched, whatever the blocks and head dims are."""

from __future__ import annotations

import pytest

from polyattn.kernels.video_tiles import choose_tile, choose_warps, video_tile

INTERPRETED = False  # read by conftest.py: no kernel runs here
ARCHITECTURES = ("sm_80", "sm_86", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950", "", "anything")


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_block_has_a_tile(arch: str, element_size: int) -> None:
    for head_dim in (1, 64, 72, 128, 256):
        for rows in (1, 17, 64, 100, 128, 256, 1000):
            tile = video_tile(arch, head_dim, 16, element_size, rows, rows)
            for size in (tile.block_m, tile.block_n):
                assert size >= 16
                assert size & (size - 1) == 0
                assert size == 16 or size < 2 * rows
            assert tile.packed or not tile.described
            assert set(tile.described) <= {"k", "v"}


def test_small_blocks_do_not_take_the_tiles_of_large_ones() -> None:
    assert video_tile("sm_90", 128, 128, 2, 64, 64) != video_tile("sm_90", 128, 128, 2, 256, 256)


def test_choosing_takes_more_warps_where_a_row_is_long() -> None:
    assert [choose_warps(columns) for columns in (16, 512, 2048, 4096, 65536)] == [1, 1, 4, 8, 16]
    assert choose_tile("sm_90", 128).tf32
    assert not choose_tile("gfx942", 256).tf32
