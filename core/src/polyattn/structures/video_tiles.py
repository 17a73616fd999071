"""VideoTiles: tile-sparse attention over a video grid (coarse scores choose the tiles that are attended to exactly)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import ceil, prod
from numbers import Real
from typing import Any, ClassVar, Literal

import torch

from polyattn.door.request import StructureFacts, VideoFacts
from polyattn.structures.base import Structure
from polyattn.structures.host_data import integer, integer_row
from polyattn.structures.video_meta import VideoTilesMeta, chunk_sizes, tables_of


@dataclass(frozen=True)
class VideoLayout:
    """Where the video sits in the sequence: prefix segments, then grid (frames, height, width), then padding.

    grid    tokens along time, height, width
    prefix  lengths of the segments before the video (text, condition frames, ...); dense rows, always-kept columns
    used    rows that hold tokens (the rest return 0); None: all up to the video's end
    start   first video row; None: right after the prefix

    Rows below `used` that are neither, between the prefix and `start` or after the video, are segments like the prefix.

    >>> import polyattn as pa
    >>> pa.VideoLayout((4, 8, 8), prefix=(16,)).tokens
    272
    """

    grid: tuple[int, int, int]
    prefix: tuple[int, ...] = ()
    used: int | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        prefix = tuple(
            integer("prefix", length, least=1) for length in integer_row("prefix", self.prefix, "[segments]")
        )
        object.__setattr__(self, "grid", _triple("grid", self.grid))
        object.__setattr__(self, "prefix", prefix)
        for name in ("used", "start"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else integer(name, value))
        if self.start is not None and self.start < sum(prefix):
            raise ValueError(f"start: the video follows the prefix of {sum(prefix)} rows, got {self.start}")
        if self.used is not None and self.used < self.tokens:
            raise ValueError(
                f"used: at least the {self.tokens} rows of the prefix and the video are needed, got {self.used}"
            )

    @property
    def video_start(self) -> int:
        """The first row of the video."""
        return sum(self.prefix) if self.start is None else self.start

    @property
    def tokens(self) -> int:
        """Rows up to the video's end."""
        return self.video_start + prod(self.grid)

    @property
    def rows(self) -> int:
        """Rows that hold tokens."""
        return self.tokens if self.used is None else self.used

    @property
    def segments(self) -> tuple[tuple[int, int], ...]:
        """Half-open ranges of the rows that hold tokens beside the video, in order."""
        bounds = list(accumulate(self.prefix, initial=0))
        ranges = [*pairwise(bounds), (bounds[-1], self.video_start), (self.tokens, self.rows)]
        return tuple((start, end) for start, end in ranges if start < end)


class VideoTiles(Structure):
    """O = fine + gate*coarse over tiles of a video grid; the gate is per call, and none means no coarse term.

    layout                the rows, see `VideoLayout`
    tile                  tokens of a tile along time, height, width; no shorthand for a cube
    topk, sparsity        exactly one of them: the video tiles that a query tile keeps, clamped to their number; or the
                          share dropped, rounded so that at least the other share is kept, and never none
    keep_sparse_numerics  with all tiles kept, stay on the sparse route (checkpoints distilled on it); else dense runs
    min_seq_len           fewer rows that hold tokens than this are not for the sparse route
    fallback              "dense" runs such a call, and one that no backend takes, densely, which the route records;
                          "error" refuses it with the reasons

    q, k, v are [B,S,H,D], of S rows as the layout says. TypeError or ValueError, by name, for what cannot be.

    >>> import polyattn as pa
    >>> pa.VideoTiles(pa.VideoLayout((5, 5, 5)), (4, 4, 4), sparsity=0.5).kept
    4
    """

    kind: ClassVar[str] = "video_tiles"
    layout: VideoLayout
    tile: tuple[int, int, int]
    kept: int
    num_tiles: int
    keep_sparse_numerics: bool
    min_seq_len: int
    fallback: Literal["error", "dense"]
    twins: dict[bool, dict[str, Any]]

    def __init__(
        self,
        layout: VideoLayout,
        tile: tuple[int, int, int],
        topk: int | None = None,
        sparsity: float | None = None,
        keep_sparse_numerics: bool = False,
        min_seq_len: int = 0,
        fallback: Literal["error", "dense"] = "error",
    ) -> None:
        if not isinstance(layout, VideoLayout):
            raise TypeError(f"layout: a VideoLayout is needed, got {type(layout).__name__}")
        if (topk is None) == (sparsity is None):
            raise ValueError(f"topk, sparsity: exactly one is needed, got topk={topk} and sparsity={sparsity}")
        if fallback not in ("error", "dense"):
            raise ValueError(f"fallback: 'error' or 'dense' is accepted, got {fallback!r}")
        if not isinstance(keep_sparse_numerics, bool):
            raise TypeError(f"keep_sparse_numerics: True or False is needed, got {keep_sparse_numerics!r}")
        shape = _triple("tile", tile)
        num_tiles = prod(ceil(size / edge) for size, edge in zip(layout.grid, shape, strict=True))
        kept = min(integer("topk", topk, least=1), num_tiles) if topk is not None else _kept(sparsity, num_tiles)
        least = integer("min_seq_len", min_seq_len)
        beside = sum(len(chunk_sizes(end - start, prod(shape))) for start, end in layout.segments)
        video = VideoFacts(
            layout.grid, shape, layout.segments, layout.rows, kept, num_tiles, beside, keep_sparse_numerics, least,
            fallback,
        )  # fmt: skip
        self._freeze(
            layout=layout,
            tile=shape,
            kept=kept,
            num_tiles=num_tiles,
            keep_sparse_numerics=keep_sparse_numerics,
            min_seq_len=least,
            fallback=fallback,
            facts=StructureFacts(video=video),
        )

    def _freeze(self, **fields: Any) -> None:
        super()._freeze(**{name: value for name, value in fields.items() if name != "twins"})
        object.__setattr__(self, "twins", {})  # what calls with a gate share, by whether the gate wants a gradient

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        described, rows = self.layout.rows, q_shape[1]
        fits = rows == described if self.layout.used is None else rows >= described
        if not fits or k_shape[1] != rows:
            raise ValueError(f"layout: {described} rows are described, but q has S={rows} and k S={k_shape[1]}")

    def preparation_key(self, device: torch.device, k_shape: tuple[int, ...]) -> Any:
        return device, self._rows(k_shape)

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> VideoTilesMeta:
        tables = tables_of(self.layout, self.tile, self._rows(k_shape), device)
        blocks = len(tables.sizes)
        return VideoTilesMeta(
            tables.order, tables.starts, tables.tile_of, tables.sizes, blocks - self.num_tiles, self.num_tiles,
            self.kept, self.layout.rows, prod(self.tile),
        )  # fmt: skip

    def _rows(self, k_shape: tuple[int, ...]) -> int:
        """S of a call; ahead of any call, the rows that hold tokens."""
        return k_shape[1] if k_shape else self.layout.rows

    def __repr__(self) -> str:
        return f"VideoTiles({self.layout}, tile={self.tile}, {self.kept} of {self.num_tiles} tiles kept)"


def _kept(sparsity: Any, num_tiles: int) -> int:
    if isinstance(sparsity, bool) or not isinstance(sparsity, Real):
        raise TypeError(f"sparsity: a number in [0, 1] is needed, got {sparsity!r}")
    share = float(sparsity)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"sparsity: a share in [0, 1] is needed, got {sparsity}")
    return max(1, ceil(round((1.0 - share) * num_tiles, 9)))  # 0.3 * 10 is a hair above 3, and means 3


def _triple(name: str, value: Any) -> tuple[int, int, int]:
    sizes = integer_row(name, value, "(time, height, width)")
    if len(sizes) != 3:
        raise ValueError(f"{name}: three sizes (time, height, width) are needed, got {sizes}")
    time, height, width = (integer(name, size, least=1) for size in sizes)
    return time, height, width
