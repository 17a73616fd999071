"""Which heads each Ulysses rank computes: contiguous, as equal as can be, in groups whose ratio stays whole."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn.distributed.rows import Ranges, consecutive, evenly


@dataclass(frozen=True)
class Heads:
    """Heads of each rank: query heads, and KV heads once each of those is repeated `repeat` times."""

    q: Ranges
    kv: Ranges
    repeat: int

    @property
    def total(self) -> int:
        """All query heads."""
        return self.q[-1][1]

    def counts(self, rank: int) -> tuple[int, int]:
        """How many query and KV heads a rank computes."""
        (a, b), (c, d) = self.q[rank], self.kv[rank]
        return b - a, d - c


def split_heads(heads: int, kv_heads: int, ranks: int) -> Heads:
    """Share heads out in whole groups (the query heads of one KV head) while there is one for each rank.

    Nothing is padded: where the ranks do not divide the groups, some compute one group less. With more ranks than KV
    heads, KV heads are repeated, as often as makes the largest share smallest.

    >>> split_heads(28, 7, 2)
    Heads(q=((0, 16), (16, 28)), kv=((0, 4), (4, 7)), repeat=1)
    >>> split_heads(8, 2, 4).repeat
    2
    """
    group = heads // kv_heads
    sizes = [group] if kv_heads >= ranks else [size for size in range(group, 0, -1) if group % size == 0]
    unit = min(sizes, key=lambda size: (-(-(heads // size) // ranks) * size, -size))
    shares = evenly(heads // unit, ranks)
    return Heads(consecutive(tuple(share * unit for share in shares)), consecutive(shares), group // unit)
