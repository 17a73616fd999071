"""A rank that ends while others need it: they fail in time, and say in which call, with torch's words as the cause."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from polyattn.distributed.failure import Communicating, PeerLost
from tests.distributed.pool import Pool, RanksFailed

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 60.0
CALL = "ulysses=3: q bfloat16 [1, 4608, 24, 128]"


def _all_to_all(group: dist.ProcessGroup) -> None:
    rows = torch.ones(3, 1024)
    dist.all_to_all_single(torch.empty_like(rows), rows, group=group)


def _all_gather(group: dist.ProcessGroup) -> None:
    dist.all_gather([torch.empty(1024) for _ in range(3)], torch.ones(1024), group=group)


def _pass_on(group: dist.ProcessGroup) -> None:
    rank, there = dist.get_rank(group), torch.empty(1024)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, torch.ones(1024), (rank + 1) % 3, group),
            dist.P2POp(dist.irecv, there, (rank - 1) % 3, group),
        ]
    )
    for work in works:
        work.wait()


EXCHANGES: dict[str, Callable[[dist.ProcessGroup], None]] = {
    "all_to_all": _all_to_all,
    "all_gather": _all_gather,
    "pass_on": _pass_on,
}


def dies_within(group: dist.ProcessGroup, name: str) -> tuple[str, str, float]:
    """Rank 1 is killed between two exchanges, while the others are in the second."""
    EXCHANGES[name](group)
    if dist.get_rank(group) == 1:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)
    begun = time.monotonic()
    try:
        with Communicating(group, CALL):
            EXCHANGES[name](group)
    except PeerLost as error:
        return str(error), type(error.__cause__).__name__, time.monotonic() - begun
    return "done", "", 0.0


@pytest.mark.parametrize("name", EXCHANGES)
def test_a_rank_killed_in_an_exchange_is_an_error_of_the_others_with_the_call(pool: Pool, name: str) -> None:
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, f"{HERE}:dies_within", name, limit=LIMIT)
    assert caught.value.reports == {1: "the process ended with exit code -9"}
    errors = {rank: answer for rank, answer in caught.value.results.items() if answer[0] != "done"}
    assert errors, "somebody needed it"
    for rank, (text, cause, seconds) in errors.items():
        assert text.startswith(
            f"parallel: rank {rank} of 3 (global ranks 0-2) lost a peer in {CALL}: another rank has ended"
        )
        assert cause in ("RuntimeError", "DistBackendError", "DistNetworkError")
        assert seconds < 30


def of_its_own(group: dist.ProcessGroup, error: Exception) -> str:
    try:
        with Communicating(group, CALL):
            raise error
    except Exception as raised:
        return f"{raised is error} {type(raised).__name__}"


@pytest.mark.parametrize("error", [ValueError("gloo"), RuntimeError("CUDA out of memory"), PeerLost("told before")])
def test_errors_that_are_no_lost_peer_pass_unchanged(pool: Pool, error: Any) -> None:
    assert pool.run(1, f"{HERE}:of_its_own", error, limit=LIMIT) == [f"True {type(error).__name__}"]
