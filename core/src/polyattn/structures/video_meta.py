"""VideoTilesMeta: the order of tokens by tiles, derived once a layout and device, and what slots read of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any

import torch

from polyattn.structures.base import Meta, deriving, keep
from polyattn.structures.host_data import on_host
from polyattn.structures.lasting import lasting
from polyattn.structures.transfer import send

if TYPE_CHECKING:
    from polyattn.structures.video_tiles import VideoLayout

#: Layouts and devices whose tables are kept; the oldest are dropped.
_TABLES_LIMIT = 32

Triple = tuple[int, int, int]


@dataclass(frozen=True, eq=False)
class VideoTables:
    """Where the tokens of a layout lie, on one device; shared by every structure of that layout.

    order    int32 [S]: place in tile order -> row. Segments beside the video first, each cut into chunks of a tile's
             volume and one remainder; then video tiles in (t, h, w) order, those at an edge smaller; then rows past
             `used`
    starts   int32 [n + 1]: first place of each block; the last is `used`
    tile_of  int32 [S]: row -> its block, -1 past `used`
    sizes    rows of each block, on the host
    """

    order: torch.Tensor
    starts: torch.Tensor
    tile_of: torch.Tensor
    sizes: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class VideoTilesMeta(Meta):
    """VideoTiles on one device, for a call of S rows.

    order, starts, tile_of  int32 [S], [n + 1], [S]: see `VideoTables`
    sizes                   rows of each of the n blocks, on the host
    prefix_blocks           blocks before the video's: their rows see every block, and every row sees them
    video_blocks            tiles of the video
    kept                    tiles that a query tile of the video keeps, 1 to video_blocks
    used                    rows that hold tokens; later ones return 0
    volume                  rows of a full tile
    gate                    [B,S,H,Dv], the weight of the coarse term in this call, or None: no coarse term
    """

    order: torch.Tensor
    starts: torch.Tensor
    tile_of: torch.Tensor
    sizes: tuple[int, ...]
    prefix_blocks: int
    video_blocks: int
    kept: int
    used: int
    volume: int
    gate: torch.Tensor | None = None

    def __post_init__(self) -> None:
        vars(self)["_derived"] = {}  # made here, so that the metas of calls with a gate share what is derived

    def with_gate(self, gate: torch.Tensor) -> VideoTilesMeta:
        """The same tables for a call with that gate."""
        weighted = object.__new__(VideoTilesMeta)
        vars(weighted).update(vars(self), gate=gate)
        return weighted

    @property
    def blocks(self) -> int:
        """All blocks, n."""
        return self.prefix_blocks + self.video_blocks

    @property
    def prefix_rows(self) -> int:
        """Rows of the blocks before the video's: the first places of the order."""
        return sum(self.sizes[: self.prefix_blocks])


_tables: dict[Any, VideoTables] = {}


@lasting
def tables_of(layout: VideoLayout, tile: Triple, rows: int, device: torch.device) -> VideoTables:
    """The tables of a layout for S = `rows` on `device`, the same object each time."""
    key = (layout, tile, rows, device)
    found = _tables.get(key)
    if found is not None:
        return found
    order, starts, tile_of, sizes = _built(layout, tile, rows)
    tables = VideoTables(send(order, device), send(starts, device), send(tile_of, device), sizes)
    if on_host(order):  # not under a fake tensor mode
        with deriving:
            keep(_tables, _TABLES_LIMIT, key, tables)
    return tables


def _built(
    layout: VideoLayout, tile: Triple, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """order, starts, tile_of on the CPU, and the sizes; no shape here depends on what a tensor holds."""
    volume = tile[0] * tile[1] * tile[2]
    chunks = [size for start, end in layout.segments for size in chunk_sizes(end - start, volume)]
    edges = [_edge_sizes(size, edge) for size, edge in zip(layout.grid, tile, strict=True)]
    sizes = (*chunks, *(time * height * width for time, height, width in product(*edges)))
    starts = list(accumulate(sizes, initial=0))
    beside = [torch.arange(start, end, device="cpu") for start, end in layout.segments]
    before = sum(chunks)
    order = torch.empty(rows, dtype=torch.int32, device="cpu")
    order[:before] = torch.cat(beside) if beside else torch.empty(0, dtype=torch.int64, device="cpu")
    place = _places(layout.grid, tile).flatten() + before
    order[place] = torch.arange(layout.video_start, layout.tokens, dtype=torch.int32, device="cpu")
    order[starts[-1] :] = torch.arange(starts[-1], rows, dtype=torch.int32, device="cpu")
    block = torch.arange(len(sizes), dtype=torch.int32, device="cpu").repeat_interleave(
        torch.tensor(sizes, dtype=torch.int64, device="cpu"), output_size=starts[-1]
    )
    tile_of = torch.full((rows,), -1, dtype=torch.int32, device="cpu")
    tile_of[order[: starts[-1]].to(torch.int64)] = block
    return order, torch.tensor(starts, dtype=torch.int32, device="cpu"), tile_of, sizes


def chunk_sizes(length: int, volume: int) -> list[int]:
    """A segment in chunks of a tile's volume and one remainder."""
    whole, rest = divmod(length, volume)
    return [volume] * whole + ([rest] if rest else [])


def _edge_sizes(size: int, edge: int) -> Sequence[int]:
    return chunk_sizes(size, edge)


def _places(grid: Triple, tile: Triple) -> torch.Tensor:
    """int64 [T,H,W]: where each token of the video lies in tile order.

    Before tile (i, j, k) lie all tiles of the layers before, then those of the rows before in its own layer, which are
    as thick as it is, then those before in its own row, which are as thick and as high.
    """
    (time, height, width), (deep, high, wide) = grid, tile
    t, h, w = (
        torch.arange(size, device="cpu").reshape([-1 if axis == own else 1 for axis in range(3)])
        for own, size in enumerate(grid)
    )
    thickness = (time - t // deep * deep).clamp(max=deep)
    rise = (height - h // high * high).clamp(max=high)
    span = (width - w // wide * wide).clamp(max=wide)
    before = t // deep * deep * height * width + thickness * (h // high * high * width + rise * (w // wide * wide))
    return before + (t % deep * rise + h % high) * span + w % wide
