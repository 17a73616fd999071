"""How the kernels that move rows cut them: elements, rows and programs."""

from __future__ import annotations

from functools import lru_cache

#: One program's share: four 16-byte vectors for each of its threads keep the memory busy.
TILE_BYTES = 16384
WARPS = 8

#: Rows of LSE that one program moves for one head.
LSE_ROWS = 1024

#: Programs that look for something to clear; each that finds nothing ends at once.
CLEARING_PROGRAMS = 528

_NARROWEST, _WIDEST = 64, 2048


@lru_cache(maxsize=256)
def columns(width: int, tile: int) -> int:
    """Elements of a row of `width` that a program moves at once, a power of two of at most `tile`.

    The widest of those that leave the fewest lanes idle: 1024 for 24 heads of 128, 128 for 17 heads of 80.
    """
    if width <= _NARROWEST:
        return min(tile, 1 << max(0, width - 1).bit_length())
    sizes = [size for size in (64, 128, 256, 512, 1024, _WIDEST) if size <= tile]
    return min(sizes, key=lambda size: (-(-width // size) * size, -size))


def tile_of(itemsize: int) -> int:
    """Elements of one program's share."""
    return TILE_BYTES // itemsize


def clearing_programs(blocks: int, batch: int) -> int:
    """Programs for each sample of `blocks` tiles."""
    return max(1, min(blocks, -(-CLEARING_PROGRAMS // batch)))
