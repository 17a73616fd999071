"""Who holds and who attends to which rows and heads: arithmetic that every rank does alike."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyattn.distributed import SequenceParallel
from polyattn.distributed.heads import split_heads
from polyattn.distributed.moves import moves_of
from polyattn.distributed.rows import Split, Spread, evenly, globally, located, overlap, size
from polyattn.distributed.stated_rows import split_of


def test_rows_are_shared_out_as_equally_as_can_be() -> None:
    assert evenly(10, 4) == (3, 3, 2, 2)
    assert evenly(1, 3) == (1, 0, 0)


def test_rows_are_found_where_they_lie_among_others() -> None:
    held = ((0, 2), (6, 9))
    assert located(((1, 2), (6, 8)), held) == ((1, 4),)
    assert globally((1, 4), held) == ((1, 2), (6, 8))
    assert overlap(held, ((1, 7),)) == ((1, 2), (6, 7))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 40), st.integers(0, 3), st.integers(0, 3), st.booleans())
def test_every_row_has_one_place_and_travels_once_to_every_seat(
    ulysses: int, places: int, rows: int, lead: int, trail: int, zigzag: bool
) -> None:
    split = Split(lead, evenly(rows, ulysses * places), trail)
    spread = Spread(ulysses, places, split, split, zigzag)
    blocks = sorted(pair for place in range(places) for pair in spread.block(split, place))
    assert overlap(tuple(blocks), ((0, split.total),)) == (((lead, lead + rows),) if rows else ())
    assert sum(size(spread.block(split, place)) for place in range(places)) == rows
    heads = split_heads(12, 12, ulysses)
    moves = [moves_of(spread, split, heads, rank, replicated=False) for rank in range(spread.ranks)]
    for sender in range(spread.ranks):
        for receiver in range(spread.ranks):
            assert moves[sender].lent_rows[receiver] == moves[receiver].attended_rows[sender]
        assert sum(moves[sender].lent_rows) == ulysses * split.shards[sender]


def test_zigzag_balances_causal_work() -> None:
    split = Split(0, (8, 8, 8, 8), 0)
    spread = Spread(1, 4, split, split, zigzag=True)
    assert [spread.block(split, place) for place in range(4)] == [
        ((0, 4), (28, 32)),
        ((4, 8), (24, 28)),
        ((8, 12), (20, 24)),
        ((12, 20),),
    ]
    works = [sum(row + 1 for pair in spread.block(split, place) for row in range(*pair)) for place in range(4)]
    assert len(set(works)) == 1


# fault_cases row 30
def test_heads_are_shared_out_in_whole_groups() -> None:
    assert split_heads(28, 7, 2).q == ((0, 16), (16, 28))
    assert split_heads(28, 7, 2).kv == ((0, 4), (4, 7))
    assert split_heads(30, 30, 4).q == ((0, 8), (8, 16), (16, 23), (23, 30))


def test_kv_heads_are_repeated_where_there_are_fewer_than_ranks() -> None:
    found = split_heads(8, 2, 4)
    assert (found.q, found.kv, found.repeat) == (((0, 2), (2, 4), (4, 6), (6, 8)), ((0, 1), (1, 2), (2, 3), (3, 4)), 2)


@given(st.integers(1, 9), st.integers(1, 8), st.integers(1, 9))
def test_each_rank_s_query_heads_meet_their_own_kv_heads(kv_heads: int, group: int, ranks: int) -> None:
    heads = split_heads(kv_heads * group, kv_heads, ranks)
    for rank in range(ranks):
        (a, b), (c, d) = heads.q[rank], heads.kv[rank]
        assert (b - a == 0) == (d - c == 0)
        for head in range(a, b):
            repeated = c + (head - a) // ((b - a) // (d - c))
            assert repeated // heads.repeat == head // group


@pytest.mark.parametrize(
    ("parallel", "side", "held", "told", "exactly", "shares"),
    [
        (SequenceParallel(ulysses=4), "q", 5, None, True, (5, 5, 5, 5)),
        (SequenceParallel(ulysses=4), "k", 3, 13, True, (3, 3, 2, 2)),  # 10 of the 13 rows are shared out
        (SequenceParallel(ulysses=4, rows=10), "q", 3, None, True, (3, 3, 2, 2)),
        (SequenceParallel(ulysses=4, rows=(1, 0, 4, 4)), "k", 1, 12, True, (1, 0, 4, 4)),
        (SequenceParallel(ulysses=4, rows=8), "k", 3, 13, True, (3, 3, 2, 2)),
        (SequenceParallel(ulysses=4, rows=12), "k", 3, 8, False, (3, 3, 3, 3)),
        (SequenceParallel(ulysses=4, rows=7), "q", 2, 2, False, (2, 2, 2, 1)),  # documents end before the shards
        (SequenceParallel(ulysses=4, rows=8, kv_rows=(9, 0, 0, 0)), "k", 9, None, True, (9, 0, 0, 0)),
    ],
)
def test_rows_of_all_ranks_follow_from_what_is_stated(
    parallel: SequenceParallel, side: str, held: int, told: int | None, exactly: bool, shares: tuple[int, ...]
) -> None:
    assert split_of(parallel, side, (1, 2), held, 0, told, exactly) == Split(1, shares, 2)


def test_a_rank_that_holds_other_rows_than_stated_is_told_what_to_state() -> None:
    with pytest.raises(ValueError, match=r"rank 1 should hold 3 of 10 rows of q, but holds 5.*holding"):
        split_of(SequenceParallel(ulysses=4, rows=10), "q", (0, 0), 5, 1, None, True)
