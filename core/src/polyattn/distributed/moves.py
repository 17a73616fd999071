"""Which rows and heads travel between two ranks when heads are exchanged for rows: arithmetic, no tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from polyattn.distributed.heads import Heads
from polyattn.distributed.rows import Ranges, Split, Spread, located, overlap, size
from polyattn.structures import Structure

Kind = Literal["q", "kv"]

#: Sizes that moves remember: a plan has a few.
_LIMIT = 16


@dataclass(frozen=True, eq=False)
class Moves:
    """One rank's side of an exchange; each member lends the rows it holds, and attends to rows with its heads.

    lent      [member] local rows that this rank holds and that member attends to
    attended  [member] local rows that this rank attends to and that member holds
    seats     [member] its number among the ranks that share the heads out
    seat      this rank's
    """

    lent: tuple[Ranges, ...]
    attended: tuple[Ranges, ...]
    seats: tuple[int, ...]
    seat: int
    heads: Heads

    def lent_sizes(self, kinds: tuple[Kind, ...], widths: tuple[int, ...], batch: int) -> list[int]:
        """Elements of each member's segment, as this rank packs tensors of these kinds and widths."""
        key = kinds, widths, batch
        if key not in self._sizes:
            while len(self._sizes) >= _LIMIT:
                del self._sizes[next(iter(self._sizes))]
            self._sizes[key] = [
                rows * batch * sum(self.width(member, kind) * width for kind, width in zip(kinds, widths, strict=True))
                for member, rows in enumerate(self.lent_rows)
            ]
        return self._sizes[key]

    @cached_property
    def _sizes(self) -> dict[tuple[tuple[Kind, ...], tuple[int, ...], int], list[int]]:
        return {}

    def width(self, member: int, kind: Kind) -> int:
        """Heads of one kind that a member computes."""
        return self.heads.counts(self.seats[member])[kind == "kv"]

    def own_width(self, kind: Kind) -> int:
        """Heads of one kind that this rank computes."""
        return self.heads.counts(self.seat)[kind == "kv"]

    @property
    def own_heads(self) -> tuple[int, int]:
        """(query, KV) heads that this rank computes."""
        return self.heads.counts(self.seat)

    def span(self, member: int, kind: Kind) -> tuple[int, int]:
        """The heads of one kind that a member computes."""
        seat = self.seats[member]
        return self.heads.q[seat] if kind == "q" else self.heads.kv[seat]

    @cached_property
    def lent_rows(self) -> tuple[int, ...]:
        return tuple(map(size, self.lent))

    @cached_property
    def attended_rows(self) -> tuple[int, ...]:
        return tuple(map(size, self.attended))

    @cached_property
    def attended_total(self) -> int:
        """All rows that this rank attends to."""
        return sum(self.attended_rows)

    @cached_property
    def busy(self) -> tuple[int, ...]:
        """Members that attend to rows of this rank."""
        return tuple(member for member, rows in enumerate(self.lent) if rows)

    @cached_property
    def alike(self) -> bool:
        """Whether they all attend to the same rows, one after the other, heads at even distances: one copy packs."""
        busy = self.busy
        widths = {self.heads.counts(self.seats[member]) for member in busy}
        rows = {self.lent[member] for member in busy}
        every_seat = tuple(self.seats[member] for member in busy) == tuple(range(len(self.heads.q)))
        if not every_seat or len(widths) != 1 or len(rows) != 1 or len(*rows) != 1:
            return False
        first, all_heads = self.heads.kv[0][0], self.heads.of[1]
        return all((start - first) * len(busy) == seat * all_heads for seat, (start, _) in enumerate(self.heads.kv))


@dataclass(frozen=True, eq=False)
class Exchange:
    """One group of heads: what travels there and back, and the structure of this rank's heads in it.

    together  whether queries and keys have the same rows on every rank, so that they travel as one
    """

    q: Moves
    k: Moves
    out: Moves
    together: bool
    structure: Structure | None


def moves_of(spread: Spread, split: Split, heads: Heads, rank: int, *, replicated: bool) -> Moves:
    """The moves of one side (queries or keys) for a rank; `replicated`: with the rows that every rank holds.

    All ranks are members; those of other places get something only where blocks are not the shards of their ranks.
    """
    place = spread.place(rank)
    mine = _held(split, rank, replicated)
    block = _attended(spread, split, place, replicated)
    lent, attended = [], []
    for member in range(spread.ranks):
        with_everyone = replicated and spread.place(member) == place
        theirs = _attended(spread, split, spread.place(member), with_everyone)
        lent.append(located(overlap(mine, theirs), mine))
        attended.append(located(overlap(_held(split, member, with_everyone), block), block))
    seats = tuple(member % spread.ulysses for member in range(spread.ranks))
    return Moves(tuple(lent), tuple(attended), seats, rank % spread.ulysses, heads)


def _held(split: Split, rank: int, replicated: bool) -> Ranges:
    return split.held(rank) if replicated else (split.shard(rank),)


def _attended(spread: Spread, split: Split, place: int, replicated: bool) -> Ranges:
    block = spread.block(split, place)
    return split.with_everyone(block) if replicated else block
