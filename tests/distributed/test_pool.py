"""The pool itself: right ranks, right answers, and no failure that outlives its test."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.pool import Pool, RanksFailed

HERE = __name__


def sum_of_ranks(group: dist.ProcessGroup, scale: int) -> tuple[int, int, torch.Tensor]:
    mine = torch.tensor([float(dist.get_rank(group))]) * scale
    dist.all_reduce(mine, group=group)
    return os.getpid(), dist.get_world_size(group), mine


def odd_ranks_raise(group: dist.ProcessGroup) -> int:
    rank = dist.get_rank(group)
    if rank % 2:
        raise ValueError(f"rank {rank} is odd")
    return rank


def one_rank_dies(group: dist.ProcessGroup) -> str:
    if dist.get_rank(group) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def one_rank_sleeps(group: dist.ProcessGroup) -> None:
    time.sleep(600 if dist.get_rank(group) == 0 else 0)


def threads(group: dist.ProcessGroup) -> int:
    return torch.get_num_threads()


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_a_case_runs_on_a_group_of_exactly_so_many_ranks(pool: Pool, world: int) -> None:
    answers = pool.run(world, f"{HERE}:sum_of_ranks", 10)
    assert [(size, total.item()) for _, size, total in answers] == [(world, 10.0 * sum(range(world)))] * world


def test_cases_share_their_processes(pool: Pool) -> None:
    first, second = ([pid for pid, *_ in pool.run(3, f"{HERE}:sum_of_ranks", 1)] for _ in range(2))
    assert first == second
    assert len({*first, os.getpid()}) == 4


def test_a_rank_computes_with_one_thread(pool: Pool) -> None:
    assert pool.run(2, f"{HERE}:threads") == [1, 1]


def failure(pool: Pool, world: int, case: str, **limit: Any) -> RanksFailed:
    with pytest.raises(RanksFailed) as caught:
        pool.run(world, f"{HERE}:{case}", **limit)
    assert pool.run(2, f"{HERE}:sum_of_ranks", 1)[1][1] == 2, "the pool works after a failure"
    return caught.value


def test_what_ranks_raise_is_told_for_each_rank(pool: Pool) -> None:
    failed = failure(pool, 4, "odd_ranks_raise")
    assert failed.results == {0: 0, 2: 2}
    assert sorted(failed.reports) == [1, 3]
    for rank in (1, 3):
        assert f"ValueError: rank {rank} is odd" in failed.reports[rank]
        assert failed.reports[rank] in str(failed)


def test_a_killed_rank_is_told_from_one_that_raises(pool: Pool) -> None:
    failed = failure(pool, 2, "one_rank_dies")
    assert failed.results == {0: "alive"}
    assert failed.reports == {1: "the process ended with exit code -9"}


def test_a_rank_that_does_not_end_is_killed_at_the_limit(pool: Pool) -> None:
    begun = time.monotonic()
    failed = failure(pool, 2, "one_rank_sleeps", limit=2.0)
    assert failed.reports == {0: "no answer within 2 s, killed"}
    assert time.monotonic() - begun < 60


def test_these_tests_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    """Two workers would start the ranks twice, and each would wait for the other's."""
    if not hasattr(request.config, "workerinput"):
        pytest.skip("the tests run in one process")
    assert request.node.nodeid.endswith("@distributed")
