"""SequenceParallel: how many ranks share a sequence, and by which exchange."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SequenceParallel:
    """`ulysses` ranks exchange heads, `ring` ranks pass keys and values on; the product is the group's size.

    >>> import polyattn as pa
    >>> pa.distributed.SequenceParallel().world_size
    1
    """

    ulysses: int = 1
    ring: int = 1
    mesh: Any = None

    def __post_init__(self) -> None:
        for name in ("ulysses", "ring"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: a positive number of ranks is needed, got {size!r}")

    @property
    def world_size(self) -> int:
        """Ranks that share one sequence."""
        return self.ulysses * self.ring
