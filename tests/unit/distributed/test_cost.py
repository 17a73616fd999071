"""The cost model: fitted on two measured shapes it predicts the others, and its arithmetic is that of a simulation."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from polyattn.distributed.cost import (
    Cost,
    Link,
    Machine,
    Ranks,
    Strategy,
    Work,
    all_gather,
    all_to_all,
    alone,
    attention_seconds,
)
from polyattn.distributed.cost_fit import Measured, by_hand, fitted, predicted_efficiency
from polyattn.distributed.cost_machines import H200
from polyattn.distributed.prices import price, strategies, why_not

ROOT = Path(__file__).parents[3]
FACTS = json.loads((ROOT / "benchmarks" / "results" / "distributed_by_hand.json").read_text())
MEASURED = {
    (name, strategy): Measured(
        Work(shape["rows"], shape["heads"], shape["dim"]), FACTS["ranks"], strategy,
        shape["milliseconds_alone"] / 1e3, efficiency,
    )
    for name, shape in FACTS["shapes"].items()
    for strategy, efficiency in shape["efficiency"].items()
}  # fmt: skip
FITTED_ON = (("flux", "ulysses"), ("wan480", "ulysses"))
#: Every cost is a whole number of these, so that a test can count them.
PLAIN = Machine("plain", 1e12, 4, 16, 1e12, 0.0, Link(100.0, 0.0), Link(10.0, 0.0))
SMALL = Work(rows=64, heads=4, dim=8)


@pytest.fixture(scope="module")
def machine() -> Machine:
    return fitted(H200, [MEASURED[name] for name in FITTED_ON])


@pytest.mark.parametrize("name", FITTED_ON)
def test_what_it_is_fitted_on_it_gives_back(machine: Machine, name: tuple[str, str]) -> None:
    assert by_hand(machine, MEASURED[name]).seconds == pytest.approx(MEASURED[name].seconds, rel=1e-9)


@pytest.mark.parametrize("name", sorted(set(MEASURED) - set(FITTED_ON)), ids="-".join)
def test_the_third_shape_and_the_other_strategy_are_predicted_within_15_percent(
    machine: Machine, name: tuple[str, str]
) -> None:
    measured = MEASURED[name]
    assert predicted_efficiency(machine, measured) == pytest.approx(measured.efficiency, rel=0.15)
    assert by_hand(machine, measured).seconds == pytest.approx(measured.seconds, rel=0.15)


def test_the_published_machine_is_the_fitted_one(machine: Machine) -> None:
    facts = FACTS["all_to_all"]
    assert H200.inside.bytes_per_second == facts["bytes_per_second_a_rank"]
    assert H200.inside.latency == facts["seconds_when_tiny"]
    for name in ("flops", "copy", "launch"):
        assert getattr(H200, name) == pytest.approx(getattr(machine, name), rel=0.01), name


def test_a_last_wave_that_is_not_full_takes_as_long_as_a_full_one() -> None:
    full = attention_seconds(PLAIN, SMALL, 16, 64, 4)
    assert attention_seconds(PLAIN, SMALL, 17, 64, 4) == 2 * full
    assert attention_seconds(PLAIN, SMALL, 1, 64, 4) == full
    assert attention_seconds(PLAIN, SMALL, 0, 64, 4) == 0.0
    assert full == 4 * 16 * 64 * 4 * 8 / 1e12, "pairs, twice (8 + 8) flop each"


def sent_by_rank_0(ranks: Ranks, members: int, each: float) -> tuple[float, float]:
    """Bytes to members on this host and on others, where every pair of members exchanges `each` bytes."""
    pairs = [(a, b) for a, b in permutations(range(members), 2) if a == 0]
    near = sum(b // ranks.per_host == 0 for _, b in pairs)
    return each * near, each * (len(pairs) - near)


@pytest.mark.parametrize(("per_host", "hosts", "members"), [(8, 1, 8), (4, 2, 8), (4, 2, 4), (2, 4, 8), (4, 2, 2)])
def test_an_all_to_all_sends_each_pair_its_part_over_the_link_between_them(
    per_host: int, hosts: int, members: int
) -> None:
    ranks = Ranks(per_host, hosts)
    inside, across = sent_by_rank_0(ranks, members, 800.0 / members)
    cost = all_to_all(PLAIN, ranks, 800.0, members)
    assert cost.sent == pytest.approx(inside + across)
    assert cost.moving == pytest.approx(max(inside / 100.0, across / 10.0))


def test_an_all_gather_brings_each_byte_to_a_host_once() -> None:
    assert all_gather(PLAIN, Ranks(4), 100.0, 4).moving == pytest.approx(300.0 / 100.0)
    over_hosts = all_gather(PLAIN, Ranks(4, 2), 100.0, 8)
    assert over_hosts.moving == pytest.approx(400.0 / 4 / 10.0), "4 ranks share what the other host's 4 have"
    one_a_host = all_gather(PLAIN, Ranks(4, 2), 100.0, 2, step=4)
    assert one_a_host.moving == pytest.approx(100.0 / 10.0)


def test_collectives_of_one_rank_are_free() -> None:
    assert all_to_all(H200, Ranks(8), 1e9, 1) == Cost()
    assert price(H200, SMALL, Ranks(1), Strategy()) == alone(H200, SMALL)


def simulated_ring(machine: Machine, work: Work, places: int, link: Link) -> float:
    """Place by place, step by step: a step starts when its keys are there and the step before is done."""
    chunk = 2 * work.batch * work.rows / places * work.heads * work.dim * work.element
    attending = attention_seconds(machine, work, work.rows / places, work.rows / places, work.heads)
    transfer = link.latency + machine.launch + chunk / link.bytes_per_second
    there, done = [0.0] * places, [0.0] * places
    for step in range(places):
        start = [max(there[place], done[place]) for place in range(places)]
        done = [begun + attending for begun in start]
        # Keys are sent on when they are there and the step that uses them starts, and received by then at the earliest.
        there = [start[place - 1] + transfer for place in range(places)] if step < places - 1 else there
    return max(done)


@pytest.mark.parametrize("bandwidth", [1e5, 1e8, 1e12])
@pytest.mark.parametrize("places", [2, 3, 8])
def test_a_ring_takes_as_long_as_its_simulation(places: int, bandwidth: float) -> None:
    link = Link(bandwidth, 1e-6)
    machine = replace(PLAIN, flops=1e9, inside=link, across=link, launch=1e-6, copy=float("inf"))
    work = Work(rows=768, heads=4, dim=8)
    cost = price(machine, work, Ranks(places), Strategy(ring=places))
    assert cost.seconds == pytest.approx(simulated_ring(machine, work, places, link))


def test_a_fast_link_hides_a_ring_s_transfers_and_a_slow_one_does_not() -> None:
    work = Work(rows=32760, heads=40, dim=128)
    fast, slow = (replace(H200, inside=replace(H200.inside, bytes_per_second=b)) for b in (1e12, 1e9))
    hidden, exposed = (price(machine, work, Ranks(4), Strategy(ring=4)) for machine in (fast, slow))
    assert hidden.moving == hidden.waiting == 0.0
    assert exposed.moving > 10 * exposed.attention


def test_memory_beyond_the_shard_is_two_chunks_for_a_ring_and_everything_for_a_gather() -> None:
    work = Work(rows=32760, heads=40, dim=128)
    chunk = 2 * 32760 / 8 * 40 * 128 * 2
    answer_in_float32 = 32760 / 8 * 40 * 128 * 4
    assert price(H200, work, Ranks(8), Strategy(ring=8)).memory == 2 * chunk + answer_in_float32
    assert price(H200, work, Ranks(8), Strategy(gather=8)).memory == 8 * chunk + chunk


def test_fewer_kv_heads_make_a_gather_cheaper_and_are_repeated_for_ulysses() -> None:
    alike, fewer = (Work(rows=8192, heads=32, dim=128, kv_heads=kv) for kv in (32, 4))
    gathered = [price(H200, work, Ranks(8), Strategy(gather=8)).sent for work in (alike, fewer)]
    assert gathered[1] == gathered[0] / 8
    exchanged = [price(H200, work, Ranks(8), Strategy(ulysses=8)).sent for work in (alike, fewer)]
    assert exchanged[1] == exchanged[0] * (32 + 32 + 8 + 8) / (4 * 32), "8 ranks need 8 KV heads"


def test_every_division_of_the_ranks_is_considered_once() -> None:
    found = strategies(Ranks(8))
    assert len(found) == len(set(found)) == 7
    assert all(one.ulysses * one.places == 8 for one in found)


def test_ranks_without_a_head_are_refused() -> None:
    work = Work(rows=32760, heads=40, dim=128)
    assert why_not(work, Ranks(8, 8), Strategy(ulysses=64)) == "40 heads leave 24 of 64 ranks without one"
    assert why_not(work, Ranks(8, 8), Strategy(ulysses=8, ring=8)) is None
    with pytest.raises(ValueError, match="16 ranks, but there are 8"):
        price(H200, work, Ranks(8), Strategy(ulysses=16))
