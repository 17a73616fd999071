"""The cost model's free figures from measured efficiencies: two shapes fit it, all others check it.

What was measured by hand is not what `cost.price` prices: one all-to-all for each of q, k, v and the answer, with a
copy before and after each; or one all-gather for K and one for V, which needs no copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from polyattn.distributed.cost import Cost, Machine, Ranks, Work, all_gather, all_to_all, alone, attention_seconds


@dataclass(frozen=True)
class Measured:
    """Seconds of one call on one device, and efficiency (time on one / ranks / time on all) on several."""

    work: Work
    ranks: int
    strategy: Literal["ulysses", "gather"]
    seconds_alone: float
    efficiency: float

    @property
    def seconds(self) -> float:
        """On all ranks."""
        return self.seconds_alone / self.ranks / self.efficiency


def by_hand(machine: Machine, measured: Measured) -> Cost:
    """What the model says of the strategy as it was written by hand."""
    work, ranks = measured.work, Ranks(measured.ranks)
    share, k_share = work.rows / ranks.total, work.k_rows / ranks.total
    k, v = (work.tensor(k_share, work.k_heads, width) for width in (work.dim, work.v_width))
    if measured.strategy == "gather":
        attention = attention_seconds(machine, work, share, work.k_rows, work.heads)
        gathered = (all_gather(machine, ranks, size, ranks.total) for size in (k, v))
        return sum(gathered, Cost(attention))
    attention = attention_seconds(machine, work, work.rows, work.k_rows, work.heads // ranks.total)
    sizes = (work.tensor(share, work.heads, work.dim), k, v, work.tensor(share, work.heads, work.v_width))
    exchanged = (all_to_all(machine, ranks, size, ranks.total) for size in sizes)
    return sum(exchanged, Cost(attention, copying=2 * 2 * sum(sizes) / machine.copy))


def predicted_efficiency(machine: Machine, measured: Measured) -> float:
    """The efficiency that the model expects where `measured` was measured."""
    return alone(machine, measured.work).seconds / measured.ranks / by_hand(machine, measured).seconds


def fitted(machine: Machine, measured: Sequence[Measured]) -> Machine:
    """`machine` with flops, launch and copy as two measurements under Ulysses say, one of them small.

    flops is the mean of what the two take alone; the other two solve
    time = known + launch * collectives + copied / copy.
    """
    small, large = sorted(measured, key=lambda one: one.work.rows)
    rates = [alone(machine, one.work).seconds * machine.flops / one.seconds_alone for one in (small, large)]
    machine = replace(machine, flops=sum(rates) / 2)
    free = replace(machine, launch=0.0, copy=float("inf"))
    counted = replace(free, launch=1.0)
    copied = replace(free, copy=1.0)
    rest = [one.seconds - by_hand(free, one).seconds for one in (small, large)]
    collectives = [by_hand(counted, one).waiting - by_hand(free, one).waiting for one in (small, large)]
    bytes_copied = [by_hand(copied, one).copying for one in (small, large)]
    determinant = collectives[0] * bytes_copied[1] - collectives[1] * bytes_copied[0]
    launch = (rest[0] * bytes_copied[1] - rest[1] * bytes_copied[0]) / determinant
    per_byte = (collectives[0] * rest[1] - collectives[1] * rest[0]) / determinant
    return replace(machine, launch=launch, copy=1.0 / per_byte)
