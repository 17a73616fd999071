"""What the cost model says of groups of heads: their schedule as simulated, when there are any, and what they spare."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polyattn as pa
from polyattn.distributed import SequenceParallel
from polyattn.distributed.cost import Ranks, Strategy, Work, attention_seconds
from polyattn.distributed.cost_machines import H200
from polyattn.distributed.cost_overlap import Group, elapsed
from polyattn.distributed.heads import split_heads
from polyattn.distributed.prices import groups_of, in_groups, price

WAN480, WAN720 = Work(rows=32760, heads=40, dim=128), Work(rows=75600, heads=40, dim=128)
seconds = st.integers(0, 9).map(float)
groups = st.lists(st.builds(Group, seconds, seconds, seconds, seconds, seconds), min_size=1, max_size=5)


@given(groups)
def test_a_schedule_takes_no_longer_than_its_parts_and_no_less_than_either_resource(schedule: list[Group]) -> None:
    on_stream = sum(group.pack + group.attend + group.unpack for group in schedule)
    on_link = sum(group.there + group.back for group in schedule)
    first, last = schedule[0], schedule[-1]
    took = elapsed(schedule)
    assert max(on_stream, first.pack + on_link + last.unpack) <= took <= on_stream + on_link
    assert took >= first.there + first.pack + sum(group.attend for group in schedule) + last.back + last.unpack


def test_a_single_group_overlaps_nothing_and_long_attention_hides_all_but_the_ends() -> None:
    assert elapsed([Group(1.0, 2.0, 3.0, 4.0, 5.0)]) == 15.0
    hidden = [Group(0.0, 2.0, 100.0, 3.0, 0.0)] * 4
    assert elapsed(hidden) == 2.0 + 400.0 + 3.0


@pytest.mark.parametrize(
    "work",
    [
        Work(rows=64, heads=40, dim=128),
        Work(rows=4608, heads=24, dim=128),
        Work(rows=32760, heads=40, dim=128, kv_heads=2),  # a KV head for each rank: nothing to divide
        Work(rows=32760, heads=2, dim=128),
    ],
    ids=str,
)
def test_short_calls_and_those_with_few_kv_heads_stay_whole(work: Work) -> None:
    assert groups_of(H200, work, Ranks(2)) == (0, 0)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("work", [WAN480, WAN720, Work(rows=75600, heads=40, dim=128, kv_heads=8)], ids=str)
def test_groups_are_chosen_where_they_spare_time_and_never_cost_memory(work: Work, ranks: int) -> None:
    ends = groups_of(H200, work, Ranks(ranks))
    whole, cut = (in_groups(H200, work, Ranks(ranks), each) for each in ((0, 0), ends))
    assert cut.seconds <= whole.seconds
    assert cut.memory <= whole.memory
    assert cut.sent == whole.sent
    assert all(size >= 1 for heads in split_heads(work.heads, work.k_heads, ranks).groups(ends) for size in
               (heads.counts(seat)[1] for seat in range(ranks)))  # fmt: skip
    assert price(H200, work, Ranks(ranks), Strategy(ulysses=ranks)) == cut


@pytest.mark.parametrize(("work", "most"), [(WAN480, 0.75e-3), (WAN720, 1.2e-3)], ids=str)
def test_by_the_model_two_ranks_expose_no_more_than_they_may(work: Work, most: float) -> None:
    half = attention_seconds(H200, work, work.rows, work.k_rows, work.heads // 2)
    ends = groups_of(H200, work, Ranks(2))
    assert in_groups(H200, work, Ranks(2), ends).seconds - half < most
    assert in_groups(H200, work, Ranks(2), (0, 0)).seconds - half > most, "or overlapping would not be needed"


def test_explain_tells_the_groups_and_the_largest_call() -> None:
    q = torch.empty(1, 16380, 40, 128, dtype=torch.bfloat16, device="meta")
    found = pa.explain(q, q, q, parallel=SequenceParallel(ulysses=2))
    assert any("first 2, last 1 KV heads" in note for note in found.notes)
    assert found.request.q.shape == (1, 32760, 17, 128)
    short = q[:, :64]
    notes = pa.explain(short, short, short, parallel=SequenceParallel(ulysses=2)).notes
    assert any("one group of heads" in note for note in notes)
