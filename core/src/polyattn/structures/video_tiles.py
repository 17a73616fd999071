"""VideoTiles: tile-sparse attention over a video grid (coarse scores choose the tiles that are attended to exactly)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod
from typing import ClassVar, Literal

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure


@dataclass(frozen=True)
class VideoLayout:
    """Where the video sits in the sequence: prefix segments, then grid (frames, height, width), then padding.

    grid    tokens along time, height, width
    prefix  lengths of the segments before the video; dense rows, always-kept columns
    used    rows that hold tokens (the rest return 0); None: prefix and video
    start   first video row; None: right after the prefix

    >>> import polyattn as pa
    >>> pa.VideoLayout((4, 8, 8), prefix=(16,)).tokens
    272
    """

    grid: tuple[int, int, int]
    prefix: tuple[int, ...] = ()
    used: int | None = None
    start: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid", _triple("grid", self.grid))
        object.__setattr__(self, "prefix", tuple(self.prefix))
        if any(not isinstance(length, int) or isinstance(length, bool) or length < 1 for length in self.prefix):
            raise ValueError(f"prefix: positive segment lengths are needed, got {self.prefix}")
        if self.start is not None and self.start < sum(self.prefix):
            raise ValueError(f"start: {self.start} lies inside the prefix of {sum(self.prefix)} rows")
        if self.used is not None and self.used < self.tokens:
            raise ValueError(f"used: {self.used} rows do not hold the prefix and the video, {self.tokens} rows")

    @property
    def tokens(self) -> int:
        """Rows up to the video's end."""
        return (sum(self.prefix) if self.start is None else self.start) + prod(self.grid)


class VideoTiles(Structure):
    """O = fine + gate*coarse over tiles of a video grid; the gate is per call, and none means no coarse term.

    Exactly one of `topk` (tiles kept a query tile, clamped to their number) and `sparsity` (share dropped) is given.

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
        shape = _triple("tile", tile)
        num_tiles = prod(ceil(size / edge) for size, edge in zip(layout.grid, shape, strict=True))
        if topk is not None:
            if isinstance(topk, bool) or not isinstance(topk, int) or topk < 1:
                raise ValueError(f"topk: a positive number of tiles is needed, got {topk!r}")
            kept = min(topk, num_tiles)
        else:
            assert sparsity is not None
            if not 0.0 <= sparsity <= 1.0:
                raise ValueError(f"sparsity: a share in [0, 1] is needed, got {sparsity}")
            kept = max(1, ceil(round((1.0 - sparsity) * num_tiles, 9)))
        self._freeze(
            layout=layout, tile=shape, kept=kept, num_tiles=num_tiles, keep_sparse_numerics=keep_sparse_numerics,
            min_seq_len=min_seq_len, fallback=fallback, facts=StructureFacts(),
        )  # fmt: skip

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        want = self.layout.tokens if self.layout.used is None else self.layout.used
        if q_shape[1] < want or q_shape[1] != k_shape[1] or (self.layout.used is None and q_shape[1] != want):
            raise ValueError(f"layout: {want} rows are described, but q has S={q_shape[1]} and k S={k_shape[1]}")

    def __repr__(self) -> str:
        return f"VideoTiles({self.layout}, tile={self.tile}, {self.kept} of {self.num_tiles} tiles kept)"


def _triple(name: str, value: object) -> tuple[int, int, int]:
    if isinstance(value, int) or not isinstance(value, (tuple, list)):
        raise TypeError(f"{name}: three sizes (time, height, width) are needed, got {value!r}")
    if len(value) != 3 or any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in value):
        raise ValueError(f"{name}: three positive integers are needed, got {tuple(value)}")
    return (value[0], value[1], value[2])
