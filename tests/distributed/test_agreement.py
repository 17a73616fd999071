"""Ranks that would make different calls, or that are missing, are told so on every rank, and nothing ever hangs."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from polyattn.distributed import agreement
from polyattn.distributed.agreement import agree
from polyattn.distributed.failure import PeerLost
from polyattn.errors import UnsupportedRequest
from tests.distributed.pool import Pool, RanksFailed

HERE = __name__
#: Seconds, hard, for one test; an answer takes milliseconds.
LIMIT = 60.0
CALL = {"q": (1, 4608, 24, 128), "dtype": "bfloat16", "structure": "key_padding 5f3a", "options": "()", "causal": False}


def told(group: dist.ProcessGroup, *calls: tuple[Any, Any], timeout: float = 30.0) -> list[str]:
    """What agreeing on (signature, facts), one after the other, gives: facts, or the error's name and text."""
    answers = []
    for signature, facts in calls:
        try:
            answers.append(str(agree(group, signature, facts, timeout=timeout)))
        except (UnsupportedRequest, PeerLost, ValueError) as error:
            answers.append(f"{type(error).__name__}: {error}")
    return answers


def by_rank(group: dist.ProcessGroup, calls: dict[int, list[tuple[Any, Any]]]) -> list[str]:
    return told(group, *calls[dist.get_rank(group)])


@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_with_one_call_hear_the_facts_of_all(pool: Pool, world: int) -> None:
    calls = {rank: [(CALL | {"case": world}, (100 + rank, "rows"))] for rank in range(world)}
    everyone = str(tuple((100 + rank, "rows") for rank in range(world)))
    assert pool.run(world, f"{HERE}:by_rank", calls, limit=LIMIT) == [[everyone]] * world


@pytest.mark.parametrize(
    ("field", "other", "line"),
    [
        ("q", (1, 4607, 24, 128), "q: (1, 4608, 24, 128) on ranks 0, 2 but (1, 4607, 24, 128) on rank 1"),
        ("dtype", "float32", "dtype: bfloat16 on ranks 0, 2 but float32 on rank 1"),
        ("structure", "dense", "structure: key_padding 5f3a on ranks 0, 2 but dense on rank 1"),
        ("options", "(NpuOptions(),)", "options: () on ranks 0, 2 but (NpuOptions(),) on rank 1"),
    ],
)
def test_what_differs_is_named_with_its_ranks_on_every_rank(pool: Pool, field: str, other: Any, line: str) -> None:
    calls = {rank: [(CALL | {"test": field}, ())] for rank in range(3)}
    calls[1] = [(CALL | {"test": field, field: other}, ())]
    answers = pool.run(3, f"{HERE}:by_rank", calls, limit=LIMIT)
    assert answers == [[f"UnsupportedRequest: parallel: the ranks do not make the same call. {line}"]] * 3


def test_several_differences_are_all_named_and_the_same_ones_not(pool: Pool) -> None:
    calls = {0: [(CALL, ())], 1: [(CALL | {"dtype": "float32", "causal": True}, ())]}
    for (text,) in pool.run(2, f"{HERE}:by_rank", calls, limit=LIMIT):
        assert text.endswith(
            "dtype: bfloat16 on rank 0 but float32 on rank 1; causal: False on rank 0 but True on rank 1"
        )


REFUSAL = "refused: heads 30 are not divisible"


def test_a_rank_that_refuses_its_call_tells_the_others_why_and_waits_for_nobody(pool: Pool) -> None:
    calls = {rank: [(CALL | {"test": "refusal"}, ()), (CALL | {"test": "afterwards"}, ())] for rank in range(3)}
    calls[2][0] = (REFUSAL, ())
    one, other, refusing = pool.run(3, f"{HERE}:by_rank", calls, limit=LIMIT)
    told = f"UnsupportedRequest: parallel: the ranks do not make the same call. rank 2 {REFUSAL}"
    assert one == other == [told, "((), (), ())"]
    assert refusing == ["()", "((), (), ())"]


def refuses_first(group: dist.ProcessGroup) -> tuple[float, list[str]]:
    """Rank 0 comes two seconds after the refusal; how long the refusing rank took."""
    if dist.get_rank(group) == 0:
        time.sleep(2.0)
    begun = time.monotonic()
    answers = told(group, (REFUSAL if dist.get_rank(group) else {"late": True}, ()))
    return time.monotonic() - begun, answers


def test_a_refusal_is_heard_by_who_comes_later(pool: Pool) -> None:
    (_, late), (seconds, _) = pool.run(2, f"{HERE}:refuses_first", limit=LIMIT)
    assert late[0].endswith(f"rank 1 {REFUSAL}")
    assert seconds < 1.5


def test_ranks_that_all_refuse_go_on_together(pool: Pool) -> None:
    calls = {rank: [(REFUSAL, ()), (REFUSAL, ()), ({"after": "refusals"}, (rank,))] for rank in range(3)}
    everyone = str(((0,), (1,), (2,)))
    assert pool.run(3, f"{HERE}:by_rank", calls, limit=LIMIT) == [["()", "()", everyone]] * 3


def test_calls_in_another_order_are_told_apart_and_later_ones_agree(pool: Pool) -> None:
    first, second, third = ((CALL | {"order": name}, ()) for name in ("first", "second", "third"))
    calls = {0: [first, second, third, first], 1: [second, first, third, first]}
    for one, two, three, four in pool.run(2, f"{HERE}:by_rank", calls, limit=LIMIT):
        assert one.endswith("order: first on rank 0 but second on rank 1")
        assert two.endswith("order: second on rank 0 but first on rank 1")
        assert (three, four) == ("((), ())", "((), ())")


def twice_without_a_store(group: dist.ProcessGroup) -> list[str]:
    first = told(group, (CALL | {"test": "steady"}, (1,)))
    book, reached = agreement._books[group], agreement._books[group].store
    book.store = None  # type: ignore[assignment]
    try:
        return first + told(group, (CALL | {"test": "steady"}, (1,)))
    finally:
        book.store = reached


def test_an_agreed_call_never_reaches_the_store_again(pool: Pool) -> None:
    assert pool.run(2, f"{HERE}:twice_without_a_store", limit=LIMIT) == [["((1,), (1,))"] * 2] * 2


def keys_after(group: dist.ProcessGroup, counts: list[int]) -> list[int]:
    """Keys in the store after so many signatures and refusals; those of the test itself count alike."""
    found = []
    for number, count in enumerate(counts):
        for call in range(count):
            agree(group, {"number": number, "call": call}, timeout=30.0)
            if call % 5 == 1:
                agree(group, REFUSAL)
        agree(group, {"number": number, "call": "last"}, timeout=30.0)
        dist.barrier(group)
        found.append(agreement._store_of(group).num_keys())
        dist.barrier(group)
    return found


def test_the_store_does_not_grow_with_the_calls(pool: Pool) -> None:
    few, many, more = pool.run(3, f"{HERE}:keys_after", [4, 30, 100], limit=LIMIT)[0]
    assert max(many, more) <= few + 3 * (3 + 2), "the keys of three numbers"


def forgets(group: dist.ProcessGroup) -> tuple[bool, list[str]]:
    """More signatures than are remembered, then the first one again."""
    keep, agreement._LIMIT = agreement._LIMIT, 4
    try:
        for call in range(9):
            agree(group, {"many": call}, timeout=30.0)
        return (("many", 0),) in agreement._books[group].agreed, told(group, ({"many": 0}, (7,)))
    finally:
        agreement._LIMIT = keep


def test_a_forgotten_signature_is_agreed_upon_anew(pool: Pool) -> None:
    for remembered, answer in pool.run(2, f"{HERE}:forgets", limit=LIMIT):
        assert not remembered
        assert answer == ["((7,), (7,))"]


def test_facts_belong_to_their_signature(pool: Pool) -> None:
    signature = CALL | {"test": "facts"}
    calls = {0: [(signature, (5,)), (signature, (5,))], 1: [(signature, (5,)), (signature, (6,))]}
    steady, changed = pool.run(2, f"{HERE}:by_rank", calls, limit=LIMIT)
    assert steady[1] == "((5,), (5,))"
    assert changed[1] == "ValueError: facts: rank 1 told (5,) with this signature before, now (6,)"


def comes_late(group: dist.ProcessGroup) -> tuple[float, list[str]]:
    dist.barrier(group)  # a busy machine may start them apart
    begun = time.monotonic()
    late = dist.get_rank(group) == 1
    if late:
        time.sleep(5.0)
    answers = told(group, (CALL | {"test": "late"}, ()), timeout=2.0)
    return time.monotonic() - begun - 5.0 * late, answers + told(group, (CALL | {"test": "after"}, ()))


def test_a_missing_rank_is_named_in_time_and_hears_so_when_it_comes(pool: Pool) -> None:
    for seconds, (missing, after) in pool.run(3, f"{HERE}:comes_late", limit=LIMIT):
        assert missing.startswith("PeerLost: parallel: rank 1 of 3 did not come to a call within 2 s")
        assert "dtype=bfloat16" in missing
        assert seconds < 30
        assert after == "((), (), ())", "numbers are in step again"


def one_dies_before_it_agrees(group: dist.ProcessGroup) -> list[str]:
    dist.barrier(group)
    if dist.get_rank(group) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return told(group, (CALL, ()), timeout=2.0)


def test_a_killed_rank_is_named_as_missing(pool: Pool) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, f"{HERE}:one_dies_before_it_agrees", limit=LIMIT)
    assert caught.value.reports == {2: "the process ended with exit code -9"}
    for rank in (0, 1):
        (text,) = caught.value.results[rank]
        assert text.startswith("PeerLost: parallel: rank 2 of 3 did not come to a call within 2 s")


def within_a_part(group: dist.ProcessGroup) -> list[str]:
    part = dist.new_group([1, 3], timeout=timedelta(seconds=4))
    rank = dist.get_rank(group)
    if rank not in (1, 3):
        return []
    differing = {"rows": rank}
    try:
        agree(part, differing)
        return ["agreed"]
    except UnsupportedRequest as error:
        answers = [str(error)]
    if rank == 1:
        answers += told(part, ({"rows": 1}, ()), timeout=None)  # type: ignore[arg-type]
    return answers


def test_a_part_of_the_ranks_has_numbers_of_its_own_and_its_own_patience(pool: Pool) -> None:
    answers = pool.run(4, f"{HERE}:within_a_part", limit=LIMIT)
    differ = (
        "parallel: the ranks do not make the same call. rows: 1 on rank 0 but 3 on rank 1 "
        "(numbers within the group of global ranks 1, 3)"
    )
    assert (answers[0], answers[2], answers[3]) == ([], [], [differ])
    assert answers[1][0] == differ
    assert answers[1][1].startswith("PeerLost: parallel: rank 1 of 2 did not come to a call within 4 s")


def lives_twice(group: dist.ProcessGroup) -> list[str]:
    """The group is forgotten and met again on the same store, as by destroying and initialising anew."""
    first = told(group, ({"life": 1}, ()))
    dist.barrier(group)
    del agreement._books[group]
    return first + told(group, ({"life": 2}, ()), ({"life": dist.get_rank(group)}, ()))


def test_keys_of_a_former_life_of_the_store_are_not_taken_for_answers(pool: Pool) -> None:
    for first, second, third in pool.run(2, f"{HERE}:lives_twice", limit=LIMIT):
        assert (first, second) == ("((), ())", "((), ())")
        assert third.endswith("life: 0 on rank 0 but 1 on rank 1")
