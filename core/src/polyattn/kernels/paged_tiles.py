"""How attention over pages is cut: rows and keys of a tile by architecture and shapes, splits by the device.

Everything follows from shapes and facts of the device, so that the same request runs the same way each time.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

#: Shared memory of one program, bytes.
_SHARED = {"sm_80": 163 << 10, "sm_87": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_103": 227 << 10}
_SHARED |= {"sm_86": 99 << 10, "sm_89": 99 << 10, "sm_120": 99 << 10, "sm_121": 99 << 10}
_SHARED |= {"gfx942": 64 << 10, "gfx950": 160 << 10}
_LEAST_SHARED = 64 << 10

#: Tensor cores multiply at least this many rows and columns.
_LEAST = 16

#: Rows of results that one program of the combining kernel puts together, in elements, and parts it reads at once.
COMBINED = 1024
COMBINE_AHEAD = 8
COMBINE_WARPS = 4

#: Splits that may pay: more cost more in partial results than they gain.
_MOST_SPLITS = 64


class Cut(NamedTuple):
    """Rows and keys of a tile, warps of a program, and how many tiles of keys are in flight."""

    block_m: int
    block_n: int
    warps: int
    stages: int


#: Head dims that have cuts of their own: up to 128, 256, 512.
_WIDTHS = (128, 256, 512)
#: Head dims above 128, where tensor cores read shared memory.
_WIDE = ((Cut(64, 32, 8, 2), Cut(32, 32, 4, 2)), (Cut(32, 32, 8, 2), Cut(16, 32, 4, 2)))
#: Elements of 2 bytes, cuts for each of `_WIDTHS`: the first cut that the rows fill, else the last with fewer rows.
#: "" is any other architecture, and sm_90: it is from sweeps on an H200.
_HALF = {
    "sm_100": ((Cut(128, 64, 8, 3), Cut(64, 64, 4, 3)), *_WIDE),
    "gfx942": ((Cut(128, 64, 4, 1),), (Cut(64, 32, 4, 1),), (Cut(32, 32, 4, 1),)),
    "gfx950": ((Cut(128, 64, 4, 2),), (Cut(64, 32, 4, 1),), (Cut(32, 32, 4, 1),)),
    "": ((Cut(64, 64, 4, 3),), *_WIDE),
}
#: Elements of 4 bytes, in IEEE arithmetic without tensor cores: whole operands must fit the registers.
_SINGLE = {
    "gfx942": ((Cut(32, 16, 4, 1),), (Cut(16, 16, 4, 1),), (Cut(16, 16, 4, 1),)),
    "gfx950": ((Cut(32, 16, 4, 1),), (Cut(16, 16, 4, 1),), (Cut(16, 16, 4, 1),)),
    "": ((Cut(32, 16, 8, 1),), (Cut(16, 16, 8, 1),), (Cut(16, 16, 8, 1),)),
}
#: What an architecture without cuts of its own is most like, if anything.
_LIKE = {"sm_103": "sm_100", "gfx90a": "gfx942", "gfx940": "gfx942", "gfx941": "gfx942"}

#: What a program costs beside its keys, a second kernel that combines them, and each split that this one reads: in
#: tiles of keys, of 1.2 us. Measured on an H200: combining two splits takes 9.1 us, four 9.5 us.
_START = 2.0
_COMBINE = 7.5
_COMBINE_SPLIT = 0.17


@dataclass(frozen=True)
class PagedTiles:
    """Rows of queries (times heads of the group) and keys of a tile, warps, tiles in flight, splits of the keys."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    splits: int


@dataclass(frozen=True)
class Work:
    """What is asked: bounds on rows (queries times heads of a group) and on keys that one row of the table sees.

    programs   rows of the table times KV heads
    width      the wider head dim, in elements of `itemsize` bytes
    """

    rows: int
    keys: int
    programs: int
    width: int
    itemsize: int


@lru_cache(maxsize=1024)
def paged_tiles(work: Work, arch: str, units: int) -> PagedTiles:
    """The tiles for `work` on a device of `units` multiprocessors; `arch` is "sm_90", "gfx942" or another word."""
    width = max(_LEAST, power_of_two(work.width))
    block_m, block_n, warps, stages = _sizes(work, width, arch)
    shared = _SHARED.get(arch, _LEAST_SHARED)
    while (block_m + 2 * max(stages - 1, 1) * block_n) * width * work.itemsize > shared and (
        stages > 1 or block_n > 16
    ):
        if stages > 2 or (stages == 2 and block_n <= 16):
            stages -= 1
        else:
            block_n //= 2
    programs = -(-work.rows // block_m) * work.programs
    slots = int(units * _beside(block_m, warps))
    return PagedTiles(block_m, block_n, warps, stages, _splits(programs, -(-work.keys // block_n), slots))


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def _sizes(work: Work, width: int, arch: str) -> Cut:
    """Rows, keys, warps and stages before shared memory is looked at."""
    rows = max(_LEAST, power_of_two(work.rows))
    table = _SINGLE if work.itemsize > 2 else _HALF
    place = next(place for place, most in enumerate(_WIDTHS) if width <= most)
    cuts = table.get(_LIKE.get(arch, arch), table[""])[place]
    return next((cut for cut in cuts if cut.block_m <= rows), cuts[-1]._replace(block_m=rows))


def _beside(block_m: int, warps: int) -> float:
    """Programs that a multiprocessor runs beside each other as fast as one alone.

    Few rows wait for memory; of 64 rows two fit, but share the bandwidth of the cache that holds the keys.
    """
    if block_m > 64 or warps > 4:
        return 1.0
    return 1.5 if block_m >= 64 else 2.0


def _splits(programs: int, tiles: int, slots: int) -> int:
    """Splits that end soonest: whole waves of programs over `slots`, each its share of `tiles` and a start."""
    best, least = 1, float("inf")
    for splits in range(1, max(1, min(tiles, _MOST_SPLITS)) + 1):
        waves = -(-programs * splits // slots)
        time = waves * (-(-tiles // splits) + _START) + (_COMBINE + _COMBINE_SPLIT * splits if splits > 1 else 0.0)
        if time < least:
            best, least = splits, time
    return best
