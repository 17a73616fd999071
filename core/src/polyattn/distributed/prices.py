"""The price of each strategy: what a call costs by it, and into which groups of heads Ulysses had best cut it."""

from __future__ import annotations

from math import ceil

from polyattn.distributed.cost import (
    Cost,
    Machine,
    Ranks,
    Strategy,
    Work,
    all_gather,
    all_to_all,
    attention_seconds,
)
from polyattn.distributed.cost_overlap import AHEAD, Group, elapsed
from polyattn.distributed.heads import Ends, split_heads

#: KV heads of a first or a last group at most: it is to be small, for it is waited for.
_MOST_AT_AN_END = 8


def price(machine: Machine, work: Work, ranks: Ranks, strategy: Strategy) -> Cost:
    """The cost of a strategy that has as many ranks as there are; ValueError where it cannot be.

    >>> from polyattn.distributed.cost_machines import H200
    >>> flux = Work(rows=4608, heads=24, dim=128)
    >>> price(H200, flux, Ranks(8), Strategy(ulysses=8)).seconds < price(H200, flux, Ranks(8), Strategy(ring=8)).seconds
    True
    """
    why = why_not(work, ranks, strategy)
    if why is not None:
        raise ValueError(f"{strategy}: {why}")
    u, places = strategy.ulysses, strategy.places
    if u > 1 and places == 1:
        return in_groups(machine, work, ranks, groups_of(machine, work, ranks))
    heads, kv_heads = ceil(work.heads / u), ceil(work.k_heads / u)
    rows, keys = work.rows / places, work.k_rows / places
    kv = work.tensor(keys, kv_heads, work.dim + work.v_width)
    there, back, copies = _exchanges(machine, work, ranks, u)
    cost = there + back + copies
    if strategy.ring > 1:
        return cost + _ring(machine, work, ranks, strategy, (rows, keys), (heads, kv))
    attended = Cost(attention_seconds(machine, work, rows, work.k_rows, heads))
    if strategy.gather > 1:
        packed = Cost(copying=2 * kv / machine.copy, memory=(places + 1) * kv)
        attended += all_gather(machine, ranks, kv, places, step=u) + packed
    return cost + attended


def why_not(work: Work, ranks: Ranks, strategy: Strategy) -> str | None:
    """Why a strategy cannot be had for this work, or None."""
    if strategy.ulysses * strategy.places != ranks.total:
        return f"{strategy.ulysses * strategy.places} ranks, but there are {ranks.total}"
    if strategy.ulysses > work.heads:
        return f"{work.heads} heads leave {strategy.ulysses - work.heads} of {strategy.ulysses} ranks without one"
    return None


def strategies(ranks: Ranks) -> tuple[Strategy, ...]:
    """All ways of dividing the ranks."""
    total = ranks.total
    degrees = [degree for degree in range(1, total + 1) if total % degree == 0]
    found = [Strategy(ulysses=u, ring=total // u) for u in degrees if u < total]
    found += [Strategy(ulysses=u, gather=total // u) for u in degrees if u < total]
    return (Strategy(ulysses=total), *found)


def groups_of(machine: Machine, work: Work, ranks: Ranks) -> Ends:
    """KV heads of the first and of the last group where all ranks exchange heads: what takes least in all.

    More collectives keep the host busy, which the simulation does not see: each has to earn it. So a short call stays
    whole. A first group that is small is soon there, a last one soon back, and what is between them hides the rest.

    >>> from polyattn.distributed.cost_machines import H200
    >>> [groups_of(H200, Work(rows, heads, dim=128), Ranks(2)) for rows, heads in ((4608, 24), (32760, 40))]
    [(0, 0), (2, 1)]
    """
    most = max(split_heads(work.heads, work.k_heads, ranks.total).fewest, 1)
    some = range(min(most, _MOST_AT_AN_END + 1))
    every = [(first, last) for first in some for last in some if first + last < most]

    def effort(ends: Ends) -> float:
        further = sum(size > 0 for size in ends)
        return in_groups(machine, work, ranks, ends).seconds + 2 * machine.launch * further

    return min(every, key=effort)


def in_groups(machine: Machine, work: Work, ranks: Ranks, ends: Ends) -> Cost:
    """All ranks exchange heads for rows, in groups of heads of which the outer ones are so large."""
    there, back, copies = _exchanges(machine, work, ranks, ranks.total)
    heads = split_heads(work.heads, work.k_heads, ranks.total)
    mine = [group.counts(0)[0] for group in heads.groups(ends)]
    packing = copies.copying * there.sent / (there.sent + back.sent)
    groups = []
    for size in mine:
        share = size / sum(mine)
        attention = attention_seconds(machine, work, work.rows, work.k_rows, size)
        ways = (there.waiting + share * there.moving, attention, back.waiting + share * back.moving)
        groups.append(Group(share * packing, *ways, share * (copies.copying - packing)))
    attention = sum(group.attend for group in groups)
    exposed = elapsed(groups) - attention
    copying = min(copies.copying, exposed)
    waiting = min(there.waiting + back.waiting, exposed - copying)
    held = copies.memory * sum(sorted(mine)[-AHEAD:]) / sum(mine)
    return Cost(attention, waiting, exposed - copying - waiting, copying, there.sent + back.sent, held)


def reordering(machine: Machine, work: Work, ranks: Ranks) -> Cost:
    """What it costs that rows change places before and after: about as much as heads do."""
    there, back, copies = _exchanges(machine, work, ranks, ranks.total)
    return there + back + copies


def _exchanges(machine: Machine, work: Work, ranks: Ranks, ulysses: int) -> tuple[Cost, Cost, Cost]:
    """Heads for rows, with q, k, v in one all-to-all; back; and the copies. Every rank gets a KV head."""
    if ulysses == 1:
        return Cost(), Cost(), Cost()
    rows, keys = work.rows / ranks.total, work.k_rows / ranks.total
    repeated = ceil(work.k_heads / ulysses) * ulysses
    answer = work.tensor(rows, work.heads, work.v_width)
    shards = work.tensor(rows, work.heads, work.dim) + work.tensor(keys, repeated, work.dim + work.v_width)
    there, back = (all_to_all(machine, ranks, size, ulysses) for size in (shards, answer))
    # Packed before it is sent and received in place; the answer is sent as it lies and put in order when received.
    return there, back, Cost(copying=2 * (shards + answer) / machine.copy, memory=2 * shards + answer)


def _ring(
    machine: Machine, work: Work, ranks: Ranks, strategy: Strategy, sizes: tuple[float, float], each: tuple[int, float]
) -> Cost:
    """Steps that attend to one place's keys while the next ones arrive; `each`: a rank's heads, bytes of K and V."""
    (rows, keys), (heads, kv) = sizes, each
    steps = strategy.ring
    link = machine.across if ranks.hosts > 1 else machine.inside  # one slow hop holds up all
    attending = attention_seconds(machine, work, rows, keys, heads)
    transfer, waiting = kv / link.bytes_per_second, link.latency + machine.launch
    late = max(transfer + waiting - attending, 0.0)
    answer = work.tensor(rows, heads, work.v_width)
    merging = (answer + 2 * 4 / work.element * answer) / machine.copy  # read one, read and write the float32 sum
    exposed = min(late, transfer) * (steps - 1)
    return Cost(
        attention=attending * steps,
        waiting=(late - min(late, transfer)) * (steps - 1),
        moving=exposed,
        copying=merging * (steps - 1) + 2 * kv / machine.copy,
        sent=kv * (steps - 1),
        memory=2 * kv + 4 / work.element * answer,
    )
