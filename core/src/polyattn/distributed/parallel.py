"""SequenceParallel: how many ranks share a sequence, by which exchange, and how many rows each of them holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from polyattn.distributed.rows import evenly

Rows = int | tuple[int, ...] | None


@dataclass(frozen=True)
class SequenceParallel:
    """`ulysses` ranks exchange heads; beside that, `ring` ranks pass keys and values on, or `gather` ranks gather them.

    ulysses  ranks that exchange heads for rows: consecutive ones
    ring     groups of `ulysses` ranks that pass keys and values around, holding two shards of them at a time
    gather   groups of `ulysses` ranks that gather all keys and values at once; one of ring and gather is 1
    mesh     a DeviceMesh of one axis, or a process group, of all these ranks; None: the default group
    rows     rows that the ranks share out, split as `shard` splits them, or the rows of each rank. None: as the
             structure says (KeyPadding, Mask, Packed, VideoTiles know how long the sequence is), else every rank holds
             equally many
    kv_rows  the same of the keys. None: as the structure says, else as `rows`, else every rank holds equally many
    ranks    instead of the three degrees: so many ranks, divided for each call as the cost model finds cheapest

    >>> import polyattn as pa
    >>> pa.distributed.SequenceParallel(ulysses=2, ring=2).world_size
    4
    """

    ulysses: int = 1
    ring: int = 1
    mesh: Any = None
    gather: int = 1
    rows: Rows = None
    kv_rows: Rows = None
    ranks: int | None = None

    def __post_init__(self) -> None:
        for name in ("ulysses", "ring", "gather", *(("ranks",) if self.ranks is not None else ())):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: a positive number of ranks is needed, got {size!r}")
        if self.ring > 1 and self.gather > 1:
            raise ValueError(
                f"ring, gather: keys are either passed on or gathered, got ring={self.ring} and gather={self.gather}"
            )
        if self.ranks is not None and (self.ulysses, self.ring, self.gather) != (1, 1, 1):
            raise ValueError(f"ranks: it leaves open how they are divided, but {self._told_degrees()} says so")
        for name in ("rows", "kv_rows"):
            object.__setattr__(self, name, self._rows(name))

    def _rows(self, name: str) -> Rows:
        given = getattr(self, name)
        if given is None:
            return None
        counts = (given,) if isinstance(given, int) else tuple(given)
        if any(isinstance(count, bool) or not isinstance(count, int) or count < 0 for count in counts):
            raise ValueError(f"{name}: numbers of rows are needed, got {given!r}")
        if not isinstance(given, int) and len(counts) != self.world_size:
            raise ValueError(f"{name}: one number for each of {self.world_size} ranks is needed, got {given!r}")
        return given if isinstance(given, int) else counts

    @property
    def places(self) -> int:
        """Places of the ring, or groups that gather: each holds a block of rows."""
        return self.ring * self.gather

    @property
    def world_size(self) -> int:
        """Ranks that share one sequence."""
        return self.ulysses * self.places if self.ranks is None else self.ranks

    @property
    def degrees(self) -> str:
        """The degrees, for a reader."""
        return self._told_degrees() if self.ranks is None else f"ranks={self.ranks}"

    def _told_degrees(self) -> str:
        sizes = ((name, getattr(self, name)) for name in ("ulysses", "ring", "gather"))
        return ", ".join(f"{name}={size}" for name, size in sizes if size > 1) or "one rank"

    def holding(self, rows: Rows, kv_rows: Rows = None) -> SequenceParallel:
        """The same for a sequence of `rows` rows, split as `shard` splits them, or of these rows on each rank.

        >>> import polyattn as pa
        >>> pa.distributed.SequenceParallel(ulysses=2).holding(7).shares(7)
        (4, 3)
        """
        return replace(self, rows=rows, kv_rows=kv_rows)

    def shares(self, total: int) -> tuple[int, ...]:
        """Rows of each rank when `total` rows are shared out: as stated for so many, else as equal as can be."""
        for stated in (self.rows, self.kv_rows):
            if isinstance(stated, tuple) and sum(stated) == total:
                return stated
        return evenly(total, self.world_size)


def check_parallel(parallel: Any) -> None:
    """Raise TypeError unless `parallel` is None or a SequenceParallel."""
    if parallel is not None and not isinstance(parallel, SequenceParallel):
        raise TypeError(f"parallel: a polyattn.distributed.SequenceParallel is needed, got {type(parallel).__name__}")


def over_ranks(parallel: Any) -> bool:
    """Whether a call is shared out over several ranks; raises as `check_parallel`."""
    if parallel is None:
        return False
    check_parallel(parallel)
    several: bool = parallel.world_size > 1
    return several
