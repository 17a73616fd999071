"""How the kernels that move rows cut them: elements, rows and programs."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

#: One program's share: four 16-byte vectors for each of its threads keep the memory busy.
TILE_BYTES = 16384
WARPS = 8

#: Rows of LSE that one program moves for one head.
LSE_ROWS = 1024

#: Programs that look for something to clear; each that finds nothing ends at once.
CLEARING_PROGRAMS = 528

#: Rows that one program looks at for something to blank, elements of them at once, and its warps.
BLANK_ROWS = 16
BLANK_COLUMNS = 512
BLANK_WARPS = 4

_NARROWEST, _WIDEST = 64, 2048


class Cut(NamedTuple):
    """How rows of a width are cut into tiles.

    columns, rows  of a tile, `tile` elements together; powers of two
    chunks         tiles beside each other that cover a row
    """

    columns: int
    rows: int
    chunks: int
    tile: int

    def tiles(self, rows: int) -> int:
        """Tiles that cover so many rows."""
        return -(-rows // self.rows) * self.chunks


@lru_cache(maxsize=256)
def cut(width: int, itemsize: int) -> Cut:
    """The cut for rows of `width` elements of `itemsize` bytes.

    >>> cut(24 * 128, 2), cut(17 * 80, 2)
    (Cut(columns=1024, rows=8, chunks=3, tile=8192), Cut(columns=128, rows=64, chunks=11, tile=8192))
    """
    tile = tile_of(itemsize)
    beside = columns(width, tile)
    return Cut(beside, tile // beside, -(-width // beside), tile)


def tile_of(itemsize: int) -> int:
    """Elements of one program's share."""
    return TILE_BYTES // itemsize


@lru_cache(maxsize=256)
def columns(width: int, tile: int) -> int:
    """Elements of a row that a program moves at once, a power of two of at most `tile`.

    The widest of those that leave the fewest lanes idle.
    """
    if width <= _NARROWEST:
        return min(tile, 1 << max(0, width - 1).bit_length())
    sizes = [size for size in (64, 128, 256, 512, 1024, _WIDEST) if size <= tile]
    return min(sizes, key=lambda size: (-(-width // size) * size, -size))


def clearing_programs(tiles: int, batch: int) -> int:
    """Programs for each sample of `tiles` tiles."""
    return max(1, min(tiles, -(-CLEARING_PROGRAMS // batch)))
