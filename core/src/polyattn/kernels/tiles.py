"""Tile sizes of the flash kernel, by architecture, head dim and dtype: a table, nothing is tuned at run time."""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Query rows and keys of one step, warps of a program, and how many steps are in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int


class Chunks(NamedTuple):
    """A head dim as one power of two, or two of them where that wastes less; `second` is 0 where there is one."""

    first: int
    second: int

    @property
    def width(self) -> int:
        """Columns computed."""
        return self.first + self.second


#: Tensor cores multiply at least 16 columns.
_LEAST = 16

#: Head dims that have a tile of their own: up to 64, 128, 256, 512.
_WIDTHS = (64, 128, 256, 512)

#: Elements of 2 bytes: a tile for each of `_WIDTHS`. Shared memory bounds them: 227 KiB on sm_90 and sm_100, 163 on
#: sm_80, 99 on sm_86, 64 on gfx942, 160 on gfx950. "" is any other architecture.
_HALF = {
    "sm_80": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 3), Tile(64, 64, 8, 2), Tile(64, 16, 8, 2)),
    "sm_86": (Tile(128, 64, 8, 3), Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(32, 16, 4, 1)),
    "sm_90": (Tile(64, 64, 4, 3), Tile(128, 128, 8, 3), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
    "sm_100": (Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 8, 2), Tile(32, 32, 8, 2)),
    "gfx942": (Tile(128, 64, 4, 1), Tile(128, 64, 4, 1), Tile(64, 32, 4, 1), Tile(32, 16, 4, 1)),
    "gfx950": (Tile(128, 64, 4, 2), Tile(128, 64, 4, 2), Tile(64, 64, 4, 1), Tile(32, 32, 4, 1)),
    "": (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)),
}

#: Elements of 4 bytes, in IEEE arithmetic: without tensor cores, small tiles do.
_SINGLE = (Tile(64, 32, 8, 2), Tile(64, 16, 8, 2), Tile(32, 16, 8, 1), Tile(16, 16, 8, 1))

#: What an architecture without tiles of its own is most like, if anything.
_LIKE = {
    "sm_87": "sm_80", "sm_89": "sm_86", "sm_103": "sm_100", "sm_120": "sm_86", "sm_121": "sm_86", "gfx940": "gfx942",
    "gfx941": "gfx942",
}  # fmt: skip

#: Programs that share the marked samples' tiles: about two for each multiprocessor of a large device.
BOUNDED_PROGRAMS = 264


def chunks(size: int) -> Chunks:
    """The powers of two that a head dim is computed in.

    >>> chunks(128), chunks(96), chunks(100)
    (Chunks(first=128, second=0), Chunks(first=64, second=32), Chunks(first=128, second=0))
    """
    whole = max(_LEAST, 1 << (size - 1).bit_length())
    rest = max(_LEAST, 1 << max(size - whole // 2 - 1, 0).bit_length())
    if whole // 2 >= _LEAST and whole // 2 + rest < whole:
        return Chunks(whole // 2, rest)
    return Chunks(whole, 0)


def tile_for(arch: str, head_dim: int, v_head_dim: int, element_size: int) -> Tile:
    """The tile for tensors of these head dims and bytes an element; `arch` is "sm_90", "gfx942" or any other word."""
    tiles = _SINGLE if element_size > 2 else _HALF.get(_LIKE.get(arch, arch), _HALF[""])
    return tiles[next(place for place, width in enumerate(_WIDTHS) if max(head_dim, v_head_dim) <= width)]
