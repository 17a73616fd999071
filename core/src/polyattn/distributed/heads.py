"""Which heads each Ulysses rank computes: contiguous, as equal as can be, in groups whose ratio stays whole."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from polyattn.distributed.rows import Ranges, consecutive, evenly

#: KV heads of the first and of the last group that a rank's heads are cut into; 0: there is none.
Ends = tuple[int, int]


@dataclass(frozen=True)
class Heads:
    """Heads of each rank: query heads, and KV heads once each of those is repeated `repeat` times.

    of  all (query, KV) heads that these are some of
    """

    q: Ranges
    kv: Ranges
    repeat: int
    of: tuple[int, int]

    def counts(self, rank: int) -> tuple[int, int]:
        """How many query and KV heads a rank computes."""
        (a, b), (c, d) = self.q[rank], self.kv[rank]
        return b - a, d - c

    @property
    def fewest(self) -> int:
        """KV heads of the rank that has fewest."""
        return min(end - start for start, end in self.kv)

    def groups(self, ends: Ends) -> tuple[Heads, ...]:
        """Each rank's heads in up to three groups: so many first KV heads, those between, so many last ones.

        Query heads stay with their KV head.

        >>> [group.q for group in split_heads(8, 8, 2).groups((1, 0))]
        [((0, 1), (4, 5)), ((1, 4), (5, 8))]
        """
        first, last = ends
        cuts = [(start, start + first, end - last, end) for start, end in self.kv]
        thirds = [tuple(pairwise(cut)) for cut in cuts]
        kept = [part for part in range(3) if (first, 1, last)[part]]
        ratio = self.of[0] // self.of[1]
        found = []
        for part in kept:
            kv = tuple(third[part] for third in thirds)
            q = tuple((start * ratio, end * ratio) for start, end in kv)
            found.append(Heads(q, kv, self.repeat, self.of))
        return tuple(found)


def split_heads(heads: int, kv_heads: int, ranks: int) -> Heads:
    """Share heads out in whole groups (the query heads of one KV head) while there is one for each rank.

    Nothing is padded: where the ranks do not divide the groups, some compute one group less. With more ranks than KV
    heads, KV heads are repeated, as often as makes the largest share smallest.

    >>> split_heads(28, 7, 2)
    Heads(q=((0, 16), (16, 28)), kv=((0, 4), (4, 7)), repeat=1, of=(28, 7))
    >>> split_heads(8, 2, 4).repeat
    2
    """
    group = heads // kv_heads
    sizes = [group] if kv_heads >= ranks else [size for size in range(group, 0, -1) if group % size == 0]
    unit = min(sizes, key=lambda size: (-(-(heads // size) // ranks) * size, -size))
    shares = evenly(heads // unit, ranks)
    return Heads(
        consecutive(tuple(share * unit for share in shares)), consecutive(shares), group // unit, (heads, heads // unit)
    )
