"""What each rank of a parallel call does, from host facts alone: the strategy, the rows, the heads, the parts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from polyattn.distributed.balance import balanced
from polyattn.distributed.choosing import groups_of_heads
from polyattn.distributed.chunks import RingPlan, wanted_of
from polyattn.distributed.heads import Ends, Heads, split_heads
from polyattn.distributed.moves import Exchange, moves_of
from polyattn.distributed.parallel import SequenceParallel
from polyattn.distributed.parts import Part, bands_of, of_heads, parts_of, why_whole
from polyattn.distributed.rows import Ranges, Split, Spread, size
from polyattn.distributed.stated_rows import split_of, structure_rows, told_exactly
from polyattn.distributed.visible import Band
from polyattn.errors import UnsupportedRequest
from polyattn.structures import KeyPadding, Mask, Paged, Structure


@dataclass(frozen=True)
class Asked:
    """The facts of a call that decide its geometry.

    q, k      rows (before, of the shard, after) that this rank holds; `complete`: k has all rows, on every rank
    heads     (query heads, KV heads); widths: of q's and v's; element: bytes
    per_host  ranks on each host, which only tells what is likely to be fast
    """

    parallel: SequenceParallel
    rank: int
    q: tuple[int, int, int]
    k: tuple[int, int, int]
    heads: tuple[int, int]
    complete: bool
    causal: bool
    window: Any
    batch: int
    widths: tuple[int, int]
    element: int
    per_host: int


@dataclass(frozen=True, eq=False)
class Geometry:
    """One rank's plan.

    name       the strategy, for a reader
    spread     where rows are; None where every rank does as if it were alone
    heads      who computes which heads
    structure  the structure of this rank's heads
    parts      what this rank attends to where all keys are at hand, else None; `gathers`: once they are gathered
    ring       what it attends to, step by step, where keys are passed on, else None
    exchanges  of heads for rows and back, a group of heads each; none where heads and rows are where they shall be
    blank      query rows of the answer, as global rows, among which padding is to be 0; None: the call does that
    notes      what was chosen, and why
    """

    name: str
    heads: Heads
    structure: Structure | None
    spread: Spread | None = None
    parts: tuple[Part, ...] | None = None
    gathers: bool = False
    ring: RingPlan | None = None
    exchanges: tuple[Exchange, ...] = ()
    blank: Ranges | None = None
    notes: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """The strategy and the KV heads of each group of heads: the same on every rank, or they would not meet."""
        groups = [exchange.q.heads.kv for exchange in self.exchanges]
        degrees = "" if self.spread is None else f" {self.spread.ulysses} x {self.spread.places}"
        return f"{self.name}{degrees}, groups of KV heads {groups}" if groups else f"{self.name}{degrees}"


def geometry_of(asked: Asked, structure: Structure | None) -> Geometry:
    """The plan of one rank; UnsupportedRequest or ValueError, the same on every rank, where there is none."""
    parallel, rank = asked.parallel, asked.rank
    if isinstance(structure, Paged):
        raise UnsupportedRequest("parallel: Paged caches are not shared out over ranks; attend to them on one rank")
    if structure is not None and structure.facts.mask_grad:
        raise UnsupportedRequest("parallel: the gradient of an additive Mask is not exchanged; detach it")
    if asked.complete:
        return _complete(asked, structure)
    q, k = splits_of(asked, structure)
    heads = split_heads(*asked.heads, parallel.ulysses)
    spread = Spread(parallel.ulysses, parallel.places, q, k)
    mine = of_heads(structure, heads.q[rank % parallel.ulysses])
    notes = (_told_of_heads(parallel, heads), _told_of_rows(q, k))
    if parallel.places == 1:
        ends, told = groups_of_heads(asked, structure, (q, k))
        found = Geometry("ulysses", heads, mine, spread, notes=(*notes, told))
        return _with_exchanges(found, structure, rank, ends)
    why = why_whole(structure)
    if why is not None:
        raise UnsupportedRequest(
            f"parallel: {parallel.degrees} would cut the rows of {why}; only ulysses ranks can share this call"
        )
    bands = bands_of(structure, asked.causal, asked.window, q.total, k.total)
    blank = isinstance(structure, KeyPadding) and structure.queries != "all"
    if parallel.gather > 1:
        place = spread.place(rank)
        parts = parts_of(mine, bands, spread.queries(place), ((0, k.total),))
        name, told = "gather", f"gather: keys and values of {parallel.gather} places in one all-gather"
        found = Geometry(name, heads, mine, spread, parts=parts, gathers=True)
    else:
        spread, told = balanced(spread, bands)
        name, found = "ring", Geometry("ring", heads, mine, spread, ring=_ring(spread, mine, bands, rank))
    if parallel.ulysses > 1:
        name = f"ulysses x {name}"
    rows = spread.queries(spread.place(rank)) if blank else None
    return _with_exchanges(replace(found, name=name, blank=rows, notes=(*notes, told)), structure, rank, (0, 0))


def splits_of(asked: Asked, structure: Structure | None) -> tuple[Split, Split]:
    """How the rows of queries and of keys are shared out."""
    told = structure_rows(structure)
    exactly = told_exactly(structure)
    q, k = (
        split_of(asked.parallel, side, (rows[0], rows[2]), rows[1], asked.rank, total, exactly)
        for side, rows, total in zip("qk", (asked.q, asked.k), told, strict=True)
    )
    return q, k


def sees_alike(structure: Structure | None, causal: bool, window: Any) -> bool:
    """Whether every query row sees the same keys, so that it does not matter which rows a rank holds."""
    if causal or window is not None:
        return False
    if isinstance(structure, KeyPadding):
        return structure.queries == "all"
    if isinstance(structure, Mask):
        return structure.tensor.shape[2] == 1
    return structure is None or structure.kind == "dense"


def _complete(asked: Asked, structure: Structure | None) -> Geometry:
    """Keys and values are complete on every rank: queries are attended with where they are."""
    heads = split_heads(*asked.heads, 1)
    note = "K and V are complete on every rank: nothing is communicated"
    if sees_alike(structure, asked.causal, asked.window):
        return Geometry("local", heads, structure, notes=(note,))
    why = why_whole(structure)
    if why is not None:
        raise UnsupportedRequest(f"parallel: kv=True would cut the query rows of {why}")
    rows, _ = structure_rows(structure)
    q = split_of(asked.parallel, "q", (asked.q[0], asked.q[2]), asked.q[1], asked.rank, rows, told_exactly(structure))
    held, keys = q.held(asked.rank), sum(asked.k)
    bands = bands_of(structure, asked.causal, asked.window, q.total, keys)
    blank = isinstance(structure, KeyPadding) and structure.queries != "all"
    if blank and q.total != keys:
        raise ValueError(
            f"structure: KeyPadding(queries='same') needs as many queries as keys, got {q.total} and {keys}"
        )
    spread = Spread(1, asked.parallel.world_size, q, Split(0, (keys,), 0))
    parts = parts_of(structure, bands, held, ((0, keys),))
    return Geometry("local", heads, structure, spread, parts=parts, blank=held if blank else None, notes=(note,))


def _ring(spread: Spread, structure: Structure | None, bands: list[Band], rank: int) -> RingPlan:
    blocks = [spread.block(spread.k, place) for place in range(spread.places)]
    place = spread.place(rank)
    queries = spread.queries(place)
    keys = [spread.own_keys(place), *(blocks[(place - step) % spread.places] for step in range(1, spread.places))]
    parts = tuple(parts_of(structure, bands, queries, rows) for rows in keys)
    seen = [
        [bool(parts_of(structure, bands, spread.queries(at), block)) for block in blocks] for at in range(spread.places)
    ]
    return RingPlan(place, parts, tuple(map(size, blocks)), wanted_of(seen), spread.k.lead)


def _with_exchanges(found: Geometry, structure: Structure | None, rank: int, ends: Ends) -> Geometry:
    spread = found.spread
    assert spread is not None
    if spread.ulysses == 1 and not spread.zigzag:
        return found
    q, k = (moves_of(spread, split, found.heads, rank, replicated=False) for split in (spread.q, spread.k))
    out = moves_of(spread, spread.q, found.heads, rank, replicated=True)
    together, seat = spread.q.shards == spread.k.shards, rank % spread.ulysses
    exchanges = []
    for heads in found.heads.groups(ends):
        mine = of_heads(structure, heads.q[seat])
        q, k, out = (replace(moves, heads=heads) for moves in (q, k, out))
        exchanges.append(Exchange(q, k, out, together, mine))
    return replace(found, exchanges=tuple(exchanges))


def _told_of_heads(parallel: SequenceParallel, heads: Heads) -> str:
    if parallel.ulysses == 1:
        return "every rank computes all heads"
    counts = [heads.counts(seat) for seat in range(parallel.ulysses)]
    repeated = f", KV heads repeated {heads.repeat} times" if heads.repeat > 1 else ""
    shares = " ".join(f"{q}/{kv}" for q, kv in counts)
    return f"ulysses: query/KV heads of each rank {shares}{repeated}; q, k, v in one all-to-all, the answer in another"


def _told_of_rows(q: Split, k: Split) -> str:
    def told(split: Split) -> str:
        shares = " ".join(map(str, split.shards)) if len(set(split.shards)) > 1 else f"{split.shards[0]} on each rank"
        return f"{split.lead}+({shares})+{split.trail}"

    return f"rows of q {told(q)}" if q == k else f"rows of q {told(q)}, of k {told(k)}"
