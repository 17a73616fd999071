"""Which rows of the glued sequence each rank holds: arithmetic over half-open ranges, no tensor and no group."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def evenly(total: int, parts: int) -> tuple[int, ...]:
    """Rows of each part, as equal as they can be; the first ones hold one more.

    >>> evenly(10, 4)
    (3, 3, 2, 2)
    """
    least, more = divmod(total, parts)
    return tuple(least + (part < more) for part in range(parts))


def consecutive(sizes: tuple[int, ...], start: int = 0) -> Ranges:
    """The ranges of parts that follow each other."""
    bounds = list(accumulate(sizes, initial=start))
    return tuple(pairwise(bounds))


def joined(ranges: Ranges) -> Ranges:
    """The same rows in as few ranges as can be; `ranges` are ascending and disjoint."""
    found: list[Range] = []
    for start, end in ranges:
        if start == end:
            continue
        if found and found[-1][1] == start:
            start, _ = found.pop()
        found.append((start, end))
    return tuple(found)


def size(ranges: Ranges) -> int:
    """How many rows there are."""
    return sum(end - start for start, end in ranges)


def overlap(ranges: Ranges, others: Ranges) -> Ranges:
    """Rows that are in both, ascending."""
    both = ((max(a, c), min(b, d)) for a, b in ranges for c, d in others)
    return joined(tuple(sorted((start, end) for start, end in both if start < end)))


def located(inner: Ranges, ranges: Ranges) -> Ranges:
    """Where the rows `inner` sit among the rows `ranges`, counted from the first of those; `inner` lies in `ranges`."""
    found: list[Range] = []
    before = 0
    for start, end in ranges:
        found += [(a - start + before, b - start + before) for a, b in overlap(inner, ((start, end),))]
        before += end - start
    return joined(tuple(found))


def globally(inner: Range, ranges: Ranges) -> Ranges:
    """The global rows of the local rows `inner`, counted among the rows `ranges`."""
    found: list[Range] = []
    before = 0
    for start, end in ranges:
        a, b = max(inner[0], before), min(inner[1], before + end - start)
        if a < b:
            found.append((a - before + start, b - before + start))
        before += end - start
    return joined(tuple(found))


@dataclass(frozen=True)
class Split:
    """The rows of queries, or of keys, along the glued sequence.

    lead    rows before the shards that every rank holds: joint front, replicated prefix
    shards  rows of each rank's shard, in rank order
    trail   rows after the shards that every rank holds: replicated suffix, joint rear
    """

    lead: int
    shards: tuple[int, ...]
    trail: int

    @property
    def spread(self) -> int:
        """Rows that the ranks share out."""
        return sum(self.shards)

    @property
    def total(self) -> int:
        """Rows of the glued sequence."""
        return self.lead + self.spread + self.trail

    def shard(self, rank: int) -> Range:
        """The rows of one rank's shard."""
        start = self.lead + sum(self.shards[:rank])
        return start, start + self.shards[rank]

    def with_everyone(self, ranges: Ranges) -> Ranges:
        """`ranges`, and the rows that every rank holds."""
        return joined(((0, self.lead), *ranges, (self.total - self.trail, self.total)))

    def held(self, rank: int) -> Ranges:
        """The rows that one rank holds when the call is made."""
        return self.with_everyone((self.shard(rank),))


@dataclass(frozen=True)
class Spread:
    """Where a call's rows are: on the ranks that hold them, and on the ranks that attend to them.

    Rank number `place * ulysses + seat` sits at `place` of the ring. The ranks of one place attend to the same rows,
    its `block`, each for other heads. In order of rank a block is the shards of its ranks; `zigzag` gives each place a
    piece of the first half of the sequence and its mirror image of the second, so that causal work is equal.
    """

    ulysses: int
    places: int
    q: Split
    k: Split
    zigzag: bool = False

    @property
    def ranks(self) -> int:
        return self.ulysses * self.places

    def place(self, rank: int) -> int:
        """The place of a rank on the ring."""
        return rank // self.ulysses

    def block(self, split: Split, place: int) -> Ranges:
        """The shared out rows that the ranks of one place attend with."""
        if self.zigzag:
            pieces = consecutive(evenly(split.spread, 2 * self.places), split.lead)
            return joined((pieces[place], pieces[-1 - place]))
        first = place * self.ulysses
        return joined((*(split.shard(rank) for rank in range(first, first + self.ulysses)),))

    def queries(self, place: int) -> Ranges:
        """The query rows of one place, with those that every rank holds."""
        return self.q.with_everyone(self.block(self.q, place))

    def own_keys(self, place: int) -> Ranges:
        """The key rows of one place, with those that every rank holds."""
        return self.k.with_everyone(self.block(self.k, place))
