"""The plan of a call: of the division that was asked for or, where that is left open, of the cheapest that can be had.

Prices are the cost model's, of facts that all ranks have, so that all of them take the same; that they did is among
what they agree on. A division is passed over where an ordinary call of it has no route, such as a ring where no backend
gives an LSE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from polyattn.distributed.balance import balanced, busiest
from polyattn.distributed.choosing import ranks_of_hosts, work_of
from polyattn.distributed.cost import Cost, Strategy
from polyattn.distributed.cost_machines import H200
from polyattn.distributed.geometry import Asked, Geometry, geometry_of, splits_of
from polyattn.distributed.parallel import SequenceParallel
from polyattn.distributed.parts import bands_of, why_whole
from polyattn.distributed.prices import price, reordering, strategies, why_not
from polyattn.distributed.rows import Spread
from polyattn.errors import UnsupportedRequest
from polyattn.structures import Structure
from polyattn.structures.base import keep

#: Geometries that a cache keeps, the oldest dropped first.
_LIMIT = 256


@dataclass(frozen=True)
class Division:
    """One way of dividing the ranks, and what it is expected to cost."""

    strategy: Strategy
    cost: Cost

    def __str__(self) -> str:
        return f"{self.strategy} {self.cost.seconds * 1e3:.3g} ms"

    def of(self, parallel: SequenceParallel) -> SequenceParallel:
        """The same ranks, so divided."""
        strategy = self.strategy
        return replace(parallel, ranks=None, ulysses=strategy.ulysses, ring=strategy.ring, gather=strategy.gather)


def planned(
    asked: Asked, structure: Structure | None, cache: dict[Any, Any], check: Callable[[Geometry], None]
) -> Geometry:
    """The geometry of a call that `check` lets pass; raises what it, or the geometry, has against the cheapest.

    `cache`: geometries by what they follow from, shared by layers whose calls differ in what does not concern rows.
    """
    if asked.parallel.ranks is None or asked.complete:
        found = _geometry(asked, structure, cache)
        check(found)
        return found
    possible = divisions(asked, structure)
    problems: list[UnsupportedRequest] = []
    for division in possible:
        try:
            found = _geometry(replace(asked, parallel=division.of(asked.parallel)), structure, cache)
            check(found)
        except UnsupportedRequest as problem:
            problems.append(problem)
            continue
        return replace(found, notes=(_told(possible, len(problems)), *found.notes))
    raise problems[0]


def _geometry(asked: Asked, structure: Structure | None, cache: dict[Any, Any]) -> Geometry:
    if asked not in cache:
        keep(cache, _LIMIT, asked, geometry_of(asked, structure))
    found: Geometry = cache[asked]
    return found


def divisions(asked: Asked, structure: Structure | None) -> tuple[Division, ...]:
    """All that the structure permits, the cheapest first."""
    q, k = splits_of(asked, structure)
    work, ranks = work_of(asked, structure, (q, k)), ranks_of_hosts(asked)
    if not work.rows or not work.k_rows or not work.batch:
        return (Division(Strategy(ulysses=ranks.total), Cost()),)
    found = []
    for strategy in strategies(ranks):
        if why_not(work, ranks, strategy) is not None:
            continue
        share, more = work.visible, Cost()
        if strategy.places > 1:
            if why_whole(structure) is not None:
                continue
            spread = Spread(strategy.ulysses, strategy.places, q, k)
            bands = bands_of(structure, asked.causal, asked.window, q.total, k.total)
            if strategy.ring > 1:
                spread, _ = balanced(spread, bands)
            more = reordering(H200, work, ranks) if spread.zigzag else more
            share = busiest(spread, bands, work.batch) * strategy.places / (work.batch * work.rows * work.k_rows)
        found.append(Division(strategy, price(H200, replace(work, visible=share), ranks, strategy) + more))
    if not found:  # more ranks than heads, and rows that cannot be cut: some ranks have nothing to do
        return (Division(Strategy(ulysses=ranks.total), Cost()),)
    return tuple(sorted(found, key=lambda one: (one.cost.seconds, one.cost.memory, str(one.strategy))))


def _told(possible: tuple[Division, ...], passed_over: int) -> str:
    chosen, *others = possible[passed_over:]
    without = f"; without a route: {', '.join(map(str, possible[:passed_over]))}" if passed_over else ""
    beside = f", beside {', '.join(map(str, others))}" if others else ", and nothing else can be had"
    return f"chosen by the cost model, with the figures of an {H200.name}: {chosen}{beside}{without}"
