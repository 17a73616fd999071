"""Where the division of the ranks is left open, a call is one rank's still, and all ranks take the same division."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, planning, shard
from polyattn.distributed.cost import Cost, Strategy
from tests.distributed.counting import exchanges
from tests.distributed.glued_cases import SQUARE
from tests.distributed.pool import Pool
from tests.distributed.test_equal_to_one_rank import CUT, WHOLE

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 60.0
HELD = ["nothing", "both apart", "keys' prefix counted", "joint front"]


@pytest.mark.parametrize("structure", [*CUT, *WHOLE])
def test_the_answer_is_one_rank_s(pool: Pool, structure: str) -> None:
    held = [name for name in HELD if structure not in SQUARE or "keys" not in name]
    answers = pool.run(
        4, "tests.distributed.glued_cases:outcomes", {"ranks": 4}, structure, held, {"grad": True}, limit=LIMIT
    )
    assert max(apart for answer in answers for found in answer.values() for apart in found.values()) < 1e-5


def by_price(group: dist.ProcessGroup, favourite: Strategy) -> tuple[str, dict[str, int], float]:
    """What explain tells, what the call exchanges, and how far its answer is from one rank's."""
    random = torch.Generator().manual_seed(2)
    whole = [torch.randn(1, 12, 4, 8, generator=random) for _ in range(3)]
    parallel = SequenceParallel(ranks=dist.get_world_size(group), mesh=group)
    mine, structure = [shard(tensor, parallel) for tensor in whole], pa.Dense()

    def priced(machine: Any, work: Any, ranks: Any, strategy: Strategy) -> Cost:
        return Cost(1.0 if strategy == favourite else 2.0)

    with patch.object(planning, "price", priced):
        told = pa.explain(*mine, structure=structure, parallel=parallel).notes
        pa.attention(*mine, structure=structure, parallel=parallel)  # agrees
        with exchanges() as counts:
            out = pa.attention(*mine, structure=structure, parallel=parallel)
    want = shard(pa.attention(*whole), parallel)
    return "\n".join(told), dict(counts), (out - want).abs().max().item()


@pytest.mark.parametrize(
    ("favourite", "name", "exchanged"),
    [
        (Strategy(ulysses=4), "ulysses", {"all_to_all_single": 2}),
        (Strategy(ring=4), "ring", {"batch_isend_irecv": 3}),
        (Strategy(gather=4), "gather", {"all_gather": 1}),
        (Strategy(ulysses=2, gather=2), "ulysses x gather", {"all_to_all_single": 2, "batch_isend_irecv": 1}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_cheapest_is_what_runs_and_what_is_told(
    pool: Pool, favourite: Strategy, name: str, exchanged: dict[str, int]
) -> None:
    for told, counts, apart in pool.run(4, f"{HERE}:by_price", favourite, limit=LIMIT):
        assert f"parallel: {name} (ranks=4)" in told
        assert f"chosen by the cost model, with the figures of an H200: {favourite} " in told
        assert counts == exchanged
        assert apart < 1e-5


def of_other_hosts(group: dist.ProcessGroup) -> str:
    """Ranks with different prices, as where a machine's own figures got into them."""
    q = torch.randn(1, 6, 4, 8)
    favourite = (Strategy(ulysses=2), Strategy(ring=2))[dist.get_rank(group)]
    with (
        patch.object(planning, "price", lambda _m, _w, _r, strategy: Cost(float(strategy != favourite))),
        pytest.raises(pa.UnsupportedRequest) as caught,
    ):
        pa.attention(q, q, q, structure=pa.Dense(), parallel=SequenceParallel(ranks=2, mesh=group))
    return str(caught.value)


def test_ranks_that_would_divide_otherwise_are_told_so_before_they_communicate(pool: Pool) -> None:
    one, other = pool.run(2, f"{HERE}:of_other_hosts", limit=LIMIT)
    assert one == other
    assert "shared out: ulysses" in one
    assert "ring" in one
