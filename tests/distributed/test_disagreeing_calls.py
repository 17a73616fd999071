"""`pa.attention` over ranks that state different calls: one error, on every rank, before anything is exchanged."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, gather
from polyattn.distributed.failure import PeerLost
from polyattn.distributed.local import LocalCall
from tests.distributed.pool import Pool, RanksFailed

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 90.0


def calls(name: str, odd: bool, rows: int) -> dict[str, Any]:
    """What rank 1 (`odd`) and the others state in the case `name`: q's facts, and arguments."""
    total = 3 * rows
    lengths = [total, total - 3]
    if name == "rows":
        return {"rows": rows + odd}
    if name == "heads":
        return {"heads": 8 if odd else 4}
    if name == "dtype":
        return {"dtype": torch.float64 if odd else torch.float32}
    if name == "structure or none":
        return {"structure": pa.KeyPadding.from_lengths(lengths, total) if odd else None}
    if name == "lengths":
        return {"structure": pa.KeyPadding.from_lengths([total - odd, 5], total)}
    if name == "causal":
        return {"causal": odd}
    if name == "scale":
        return {"scale": 0.5 if odd else 0.25}
    if name == "backend":
        return {"backend": "blocked" if odd else "sdpa"}
    if name == "return_lse":
        return {"return_lse": odd}
    assert name == "gradients"
    return {"grad": odd}


def attend(rows: int, heads: int = 4, dtype: Any = torch.float32, grad: bool = False, **stated: Any) -> Any:
    q, k, v = (torch.randn(2, rows, heads, 8, dtype=dtype, requires_grad=grad) for _ in range(3))
    return pa.attention(q, k, v, **stated)


def attends_otherwise(
    group: dist.ProcessGroup, name: str, parallel: SequenceParallel, rows: int
) -> tuple[str, torch.Size]:
    """The error of the case, and what a plain call gives afterwards. No two cases have the same rows."""
    try:
        attend(**{"rows": rows, "parallel": parallel, **calls(name, dist.get_rank(group) == 1, rows)})
        said = "answered"
    except (ValueError, TypeError) as error:
        said = str(error)
    return said, attend(rows, parallel=parallel).shape


CASES = [
    "rows", "heads", "dtype", "structure or none", "lengths", "causal", "scale", "backend", "return_lse", "gradients",
]  # fmt: skip
ARGUMENTS = ["causal", "scale", "backend"]
STRATEGIES = {
    "ulysses": SequenceParallel(ulysses=3),
    "ring": SequenceParallel(ring=3),
    "gather": SequenceParallel(gather=3),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", CASES)
def test_every_rank_hears_of_another_call_and_goes_on(pool: Pool, name: str, strategy: str) -> None:
    rows = 5 + CASES.index(name) + len(CASES) * list(STRATEGIES).index(strategy)
    answers = pool.run(3, f"{HERE}:attends_otherwise", name, STRATEGIES[strategy], rows, limit=LIMIT)
    for said, after in answers:
        assert "the ranks do not make the same call" in said
        assert "on ranks 0, 2 but" in said
        assert "on rank 1" in said
        if name in ARGUMENTS:
            assert said.partition(" call. ")[2].startswith(f"{name}: "), "nothing else is told"
        assert after == (2, rows, 4, 8)


def new_while_others_know(group: dist.ProcessGroup) -> str:
    """All ranks know a call; then rank 1 makes another one."""
    known = SequenceParallel(ring=2, mesh=dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    attend(4, parallel=known)
    try:
        attend(4 + dist.get_rank(group), parallel=known)
    except PeerLost as error:
        return str(error)
    return "answered"


def test_ranks_in_a_call_they_know_hear_of_a_new_one_when_their_exchange_fails(pool: Pool) -> None:
    known, new = pool.run(2, f"{HERE}:new_while_others_know", limit=LIMIT)
    assert "rank 0 of 2" in known
    assert "the ranks do not make the same call, rank 1 waits with another call" in known
    assert "rows of q=0 + 5 on each rank + 0" in known
    assert "rank 0 of 2 did not come to a call within 5 s; rank 1 waited with" in new


def different_degrees(group: dist.ProcessGroup) -> str:
    mine = SequenceParallel(ring=2) if dist.get_rank(group) else SequenceParallel(ulysses=2)
    try:
        attend(7, parallel=mine)
    except ValueError as error:
        return str(error)
    return "answered"


def test_ranks_that_state_different_degrees(pool: Pool) -> None:
    for said in pool.run(2, f"{HERE}:different_degrees", limit=LIMIT):
        assert "degrees: ulysses=2 on rank 0 but ring=2 on rank 1" in said


def gradient_of_the_joint_on_one_rank(group: dist.ProcessGroup) -> str:
    """Each rank wants one gradient of q, k and v: rank 1 of its shard, the others of what all ranks hold."""
    q, text = torch.randn(1, 8, 4, 8), torch.randn(1, 2, 4, 8)
    (q if dist.get_rank(group) == 1 else text).requires_grad_()
    with pytest.raises(pa.UnsupportedRequest) as caught:
        pa.attention(q, q, q, joint=pa.Joint(text, text, text), parallel=SequenceParallel(ulysses=2, mesh=group))
    return str(caught.value)


def test_gradients_of_shards_and_of_what_all_hold_are_told_apart(pool: Pool) -> None:
    for said in pool.run(2, f"{HERE}:gradient_of_the_joint_on_one_rank", limit=LIMIT):
        assert "gradients (shard, rows beside it): ((False, True)" in said


def fails_on_one_rank(group: dist.ProcessGroup, name: str) -> tuple[str, float]:
    """Rank 1 meets an error of its own before the ranks agree; what is said, and after how many seconds."""
    odd, rows = dist.get_rank(group) == 1, torch.randn(1, 3, 4, 8)
    parallel, begun = SequenceParallel(ring=2, mesh=group), time.monotonic()
    try:
        if name == "gather":
            gather(rows, parallel, dim=9 if odd else 1)
        else:
            plan = patch.object(LocalCall, "plan", side_effect=MemoryError() if name == "silent" else RuntimeError("x"))
            with plan if odd else nullcontext():
                pa.attention(rows, rows, rows, structure=pa.Dense(), parallel=parallel)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    return said, time.monotonic() - begun


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [("plan", "RuntimeError", "x"), ("silent", "MemoryError", "MemoryError"), ("gather", "IndexError", "tuple index")],
)
def test_whatever_stops_a_rank_before_they_agree_is_told_at_once(pool: Pool, name: str, kind: str, words: str) -> None:
    (other, seconds), (own, _) = pool.run(2, f"{HERE}:fails_on_one_rank", name, limit=LIMIT)
    assert own.startswith(kind)
    assert f"rank 1 refused: {words}" in other
    assert seconds < 30, "long before the group's timeout"


def killed_between_calls(group: dist.ProcessGroup, parallel: SequenceParallel) -> str:
    """Rank 1 ends after a first call that all of them agreed upon; the others make a second one."""
    attend(9, parallel=parallel)
    if dist.get_rank(group) == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        attend(9, parallel=parallel)
    except PeerLost as error:
        return f"{error} | {type(error.__cause__).__name__}"
    return "answered"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_killed_rank_is_an_error_that_names_the_call(pool: Pool, strategy: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, f"{HERE}:killed_between_calls", STRATEGIES[strategy], limit=LIMIT)
    assert caught.value.reports == {1: "the process ended with exit code -9"}
    for said in caught.value.results.values():
        assert "lost a peer" in said
        assert strategy in said
        assert said.endswith("| RuntimeError")
