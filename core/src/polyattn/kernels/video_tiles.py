"""Tile sizes of video attention, by architecture and head dim: a table, nothing is tuned at run time.

On sm_90 they are the fastest of benchmarks/cuda/video_tiles.py on an H200.
"""

from __future__ import annotations

from typing import NamedTuple


class VideoTile(NamedTuple):
    """How the fine branch is cut.

    block_m, block_n  query rows and keys of one step; a block is cut into tiles of its own
    warps, stages     of a program, and how many steps are in flight
    packed            keys and values are first put in tile order, a few heads at a time; else gathered row by row
    described         which of them tensor descriptors load, of packed ones: "", "k", "kv"
    paired            two tiles of query rows a program
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    packed: bool = False
    described: str = ""
    paired: bool = False


class HopperTile(NamedTuple):
    """How the fine branch is cut by the kernel for Hopper.

    groups  of four warps with 64 query rows each: two, or one and two programs a multiprocessor
    box     keys of one entry of the steps: how finely partial blocks are told
    keys    keys of one step of a program
    stages  steps in flight
    """

    groups: int
    box: int
    keys: int
    stages: int

    @property
    def rows(self) -> int:
        """Query rows of a program."""
        return 64 * self.groups

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a program, at most: queries, keys and values of 256 bytes a row, and barriers."""
        return (self.rows + 2 * self.stages * self.keys) * 256 + 1024


class ChooseTile(NamedTuple):
    """How blocks are scored: blocks of rows and columns of one product, warps, and whether tf32 multiplies float32."""

    rows: int
    columns: int
    warps: int
    tf32: bool


#: Head dims that have a tile of their own: up to 64, 128, 256.
_WIDTHS = (64, 128, 256)

#: Elements of 2 bytes: for query blocks of 128 rows or more, a tile for each of `_WIDTHS`. "" is anything else.
#: On sm_90 two programs of 64x64 fit by the byte: descriptors of the values, too, would need 24 bytes more.
_LARGE = {
    "sm_80": (VideoTile(128, 64, 8, 3), VideoTile(128, 32, 8, 3), VideoTile(64, 32, 8, 2)),
    "sm_90": (
        VideoTile(64, 64, 4, 3, packed=True, described="k"), VideoTile(64, 64, 4, 3, packed=True, described="k"),
        VideoTile(64, 32, 8, 2, packed=True),
    ),
    "sm_100": (
        VideoTile(128, 64, 8, 3, packed=True, described="kv"), VideoTile(128, 64, 8, 3, packed=True, described="kv"),
        VideoTile(64, 32, 8, 2, packed=True),
    ),
    "gfx942": (VideoTile(128, 64, 4, 1), VideoTile(128, 64, 4, 1), VideoTile(64, 32, 4, 1)),
    "": (VideoTile(64, 64, 4, 2), VideoTile(64, 32, 4, 2), VideoTile(32, 32, 4, 1)),
}  # fmt: skip
#: The same for smaller query blocks, whose keys come from the L2 for fewer rows.
_SMALL = {
    "sm_80": (VideoTile(64, 32, 4, 3), VideoTile(64, 32, 4, 3), VideoTile(64, 16, 4, 2)),
    "sm_90": (
        VideoTile(64, 32, 4, 3, packed=True, described="kv"), VideoTile(64, 32, 4, 3, packed=True, described="kv"),
        VideoTile(64, 32, 8, 2, packed=True),
    ),
    "sm_100": (
        VideoTile(64, 32, 4, 3, packed=True, described="kv"), VideoTile(64, 32, 4, 3, packed=True, described="kv"),
        VideoTile(64, 32, 8, 2, packed=True),
    ),
    "gfx942": (VideoTile(64, 32, 4, 1), VideoTile(64, 32, 4, 1), VideoTile(64, 32, 4, 1)),
    "": (VideoTile(64, 32, 4, 2), VideoTile(64, 32, 4, 2), VideoTile(32, 32, 4, 1)),
}  # fmt: skip
#: By groups. Boxes of 32 keys beat those of 64, as grids seldom divide.
_HOPPER = {1: HopperTile(1, 32, 64, 3), 2: HopperTile(2, 32, 128, 3)}
#: Elements of 4 bytes, in IEEE arithmetic: without tensor cores, small tiles do.
_SINGLE = (VideoTile(64, 32, 8, 2), VideoTile(64, 16, 8, 2), VideoTile(32, 16, 8, 1))

#: What an architecture without tiles of its own is most like, if anything.
_LIKE = {
    "sm_86": "", "sm_87": "sm_80", "sm_89": "", "sm_103": "sm_100", "gfx940": "gfx942", "gfx941": "gfx942",
    "gfx950": "gfx942",
}  # fmt: skip

#: Architectures with shared memory for 64 float32 rows of keys and of values twice.
_ROOMY = ("sm_80", "sm_90", "sm_100", "sm_103")

#: The fewest query rows of a block for which the large tiles are meant.
_LARGE_ROWS = 128
#: The least that a tensor core multiplies.
_LEAST = 16

#: Elements of one step of pooling and warps of those programs: one that has all it can hold on the way beats four.
POOLED, POOL_WARPS = 4096, 1
#: Rows of one step of packing and warps of those programs.
PACK_ROWS, MOVE_WARPS = 64, 4
#: Entries of a list that one step of `steps_kernel` takes.
STEPS_CHUNK = 128

#: What packed keys and values of one pass may take: this share of q, k and v, or so many bytes, if that is more.
PACKED_SHARE, PACKED_BYTES = 0.08, 160 * 2**20


def video_tile(arch: str, head_dim: int, v_head_dim: int, element_size: int, block_q: int, block_k: int) -> VideoTile:
    """The tile for these head dims, bytes an element, and rows of the largest query and key block.

    >>> video_tile("sm_90", 128, 128, 2, 64, 64).block_n, video_tile("", 128, 128, 4, 8, 8)[:2]
    (32, (16, 16))
    """
    if element_size > 2:
        tiles = _SINGLE
    else:
        table = _LARGE if block_q >= _LARGE_ROWS else _SMALL
        tiles = table.get(_LIKE.get(arch, arch), table[""])
    tile = tiles[next(place for place, width in enumerate(_WIDTHS) if max(head_dim, v_head_dim) <= width)]
    return tile._replace(
        block_m=max(_LEAST, min(tile.block_m, power_of_two(block_q))),
        block_n=max(_LEAST, min(tile.block_n, power_of_two(block_k))),
    )


def hopper_tile(
    arch: str, head_dim: int, v_head_dim: int, element_size: int, block_q: int, lines: int
) -> HopperTile | None:
    """The tile of the kernel for Hopper, or None where it does not serve; `lines` of keys are packed in all.

    >>> hopper_tile("sm_90", 128, 128, 2, 256, 75600).rows, hopper_tile("sm_90", 64, 64, 2, 256, 75600)
    (128, None)
    """
    if arch != "sm_90" or (head_dim, v_head_dim, element_size) != (128, 128, 2) or block_q < 64 or lines >= 1 << 31:
        return None
    halves = -(-block_q // 64)
    return _HOPPER[1 if halves % 2 and halves < 8 else 2]


def choose_tile(arch: str, head_dim: int) -> ChooseTile:
    """How blocks of this head dim (the wider of keys and values) are scored."""
    tf32 = arch.startswith("sm_")
    if head_dim > 128:
        return ChooseTile(16, 16, 4, tf32)
    if arch == "sm_90":  # timed on an H200: four warps spill, and are faster all the same
        return ChooseTile(32, 64, 4, tf32)
    return ChooseTile(32, 64, 8, tf32) if arch in _ROOMY else ChooseTile(32, 32, 4, tf32)


def choose_warps(columns: int) -> int:
    """Warps of the program that chooses from a row of so many scores: one as long as its registers hold them."""
    return 1 if columns <= 1024 else min(16, columns // 512)


def power_of_two(size: int) -> int:
    """The least that is not below `size`."""
    return 1 << max(size - 1, 0).bit_length()
