"""Which division of the ranks is taken where it is left open: the cheapest that the structure and the routes permit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.distributed import SequenceParallel
from polyattn.distributed.cost import Ranks, Strategy, Work
from polyattn.distributed.cost_machines import H200
from polyattn.distributed.geometry import Asked, Geometry
from polyattn.distributed.planning import divisions, planned
from polyattn.distributed.prices import price, strategies
from polyattn.errors import UnsupportedRequest


def asked(ranks: int, rows: int, heads: int, kv_heads: int | None = None, **more: Any) -> Asked:
    each = rows // ranks
    facts: dict[str, Any] = {
        "parallel": SequenceParallel(ranks=ranks), "rank": 0, "q": (0, each, 0), "k": (0, each, 0),
        "heads": (heads, kv_heads or heads), "complete": False, "causal": False, "window": None, "batch": 1,
        "widths": (128, 128), "element": 2, "per_host": ranks,
    }  # fmt: skip
    return Asked(**{**facts, **more})


def nothing(geometry: Geometry) -> None:
    """No route is missing."""


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize(("rows", "heads", "kv_heads"), [(4608, 24, 24), (75600, 40, 40), (32768, 32, 2), (96, 8, 8)])
def test_dense_calls_take_the_lowest_price_of_all(ranks: int, rows: int, heads: int, kv_heads: int) -> None:
    rows = rows // ranks * ranks
    work = Work(rows, heads, 128, kv_heads=kv_heads)
    prices = {one: price(H200, work, Ranks(ranks), one).seconds for one in strategies(Ranks(ranks))}
    best = min(prices, key=lambda one: prices[one])
    first, *_ = divisions(asked(ranks, rows, heads, kv_heads), None)
    assert first.cost.seconds == prices[best]
    found = planned(asked(ranks, rows, heads, kv_heads), None, {}, nothing)
    assert found.spread is not None
    assert (found.spread.ulysses, found.gathers, found.ring is not None) == (
        first.strategy.ulysses, first.strategy.gather > 1, first.strategy.ring > 1,
    )  # fmt: skip


def test_few_kv_heads_are_gathered_and_many_are_not() -> None:
    assert divisions(asked(8, 4096, 32, 1), None)[0].strategy == Strategy(gather=8)
    assert divisions(asked(8, 75600, 40), None)[0].strategy.gather == 1


def test_hosts_are_part_of_the_price() -> None:
    one, eight = (divisions(asked(64, 64 * 1024, 40, per_host=each), None) for each in (64, 8))
    assert one[0].cost.moving < eight[0].cost.moving
    assert [each.strategy for each in one] != [each.strategy for each in eight]


def test_a_causal_gather_pays_for_its_busiest_rank_and_a_ring_for_its_zigzag() -> None:
    full, causal = (
        {one.strategy: one.cost for one in divisions(asked(4, 65536, 40, causal=causal), None)}
        for causal in (False, True)
    )
    ulysses, ring, gather = Strategy(ulysses=4), Strategy(ring=4), Strategy(gather=4)
    assert causal[ulysses].attention == pytest.approx(0.5 * full[ulysses].attention, rel=0.01)
    assert causal[gather].attention == pytest.approx(7 / 8 * full[gather].attention, rel=0.01)
    assert causal[ring].attention == pytest.approx(0.5 * full[ring].attention, rel=0.05)
    assert causal[ring].sent > full[ring].sent, "rows change places"


@pytest.mark.parametrize(
    "structure",
    [
        pa.VideoTiles(pa.VideoLayout((96, 1, 1)), (2, 1, 1), topk=4),
        pa.Packed.from_lengths([96], capacity=(1, 96)),
        pa.BlockMap.from_mask(torch.ones(1, 1, 6, 6, dtype=torch.bool), 16, 16),
    ],
    ids=lambda structure: type(structure).__name__,
)
def test_what_cannot_be_cut_is_left_to_ulysses(structure: Any) -> None:
    assert [one.strategy for one in divisions(asked(4, 96, 8), structure)] == [Strategy(ulysses=4)]


def test_more_ranks_than_heads_leave_whole_structures_to_ulysses_all_the_same() -> None:
    structure = pa.VideoTiles(pa.VideoLayout((96, 1, 1)), (2, 1, 1), topk=4)
    assert planned(asked(4, 96, 2), structure, {}, nothing).name == "ulysses"


def refusing(*strategies: str) -> Callable[[Geometry], None]:
    def check(geometry: Geometry) -> None:
        if geometry.name in strategies:
            raise UnsupportedRequest(f"no slot has what {geometry.name} needs")

    return check


def test_a_division_without_a_route_is_passed_over_and_told() -> None:
    call = asked(2, 4608, 24)
    first, second, _ = (one.strategy.family for one in divisions(call, None))
    found = planned(call, None, {}, refusing(first))
    assert found.name == second
    assert f"without a route: {first} 2" in found.notes[0]
    with pytest.raises(UnsupportedRequest, match=f"what {first} needs"):
        planned(call, None, {}, refusing("ulysses", "ring", "gather"))


def test_ranks_leave_the_division_open_and_degrees_state_it() -> None:
    assert SequenceParallel(ranks=8).world_size == 8
    assert SequenceParallel(ranks=8).degrees == "ranks=8"
    assert SequenceParallel(ranks=1).world_size == 1
    with pytest.raises(ValueError, match="ranks: it leaves open .* ulysses=2"):
        SequenceParallel(ranks=2, ulysses=2)
    with pytest.raises(ValueError, match="ranks: a positive number"):
        SequenceParallel(ranks=0)


def test_degrees_that_are_stated_are_taken_whatever_they_cost() -> None:
    for stated in (SequenceParallel(ulysses=2), SequenceParallel(ring=2), SequenceParallel(gather=2)):
        found = planned(asked(2, 4608, 24, parallel=stated), None, {}, nothing)
        assert found.name == stated.degrees.partition("=")[0]


def test_explain_tells_the_prices() -> None:
    q = torch.empty(1, 2304, 24, 128, dtype=torch.bfloat16, device="meta")
    notes = pa.explain(q, q, q, parallel=SequenceParallel(ranks=2)).notes
    text = next(note for note in notes if note.startswith("chosen by the cost model"))
    assert all(f"{family} 2 " in text for family in ("ulysses", "ring", "gather"))
    assert "ranks=2" in notes[0]
