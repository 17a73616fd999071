"""fault_cases row 30: heads that ranks do not divide, KV heads fewer than ranks, and a ratio that is not whole."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, shard
from tests.distributed.counting import exchanges
from tests.distributed.pool import Pool

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 60.0
ROWS = 4


def called(group: dist.ProcessGroup, heads: int, kv_heads: int) -> tuple[torch.Tensor | str, Counter[str]]:
    """Where q is 0 and v of KV head g is g + 1, the answer for this rank, or the refusal; and what was exchanged."""
    parallel = SequenceParallel(ulysses=dist.get_world_size(group), mesh=group).holding(ROWS)
    q, k = torch.zeros(1, ROWS, heads, 8), torch.ones(1, ROWS, kv_heads, 8)
    v = k * torch.arange(1.0, kv_heads + 1)[:, None]
    with exchanges() as counts:
        try:
            out: torch.Tensor | str = pa.attention(*(shard(each, parallel) for each in (q, k, v)), parallel=parallel)
        except ValueError as refusal:
            out = str(refusal)
    q = torch.zeros(1, ROWS, 4, 8)
    pa.attention(*(shard(q, parallel) for _ in range(3)), parallel=parallel)  # the ranks are still together
    return out, counts


@pytest.mark.parametrize(("world", "heads", "kv_heads"), [(2, 28, 7), (4, 8, 2), (4, 30, 30)])
def test_every_query_head_keeps_its_kv_head(pool: Pool, world: int, heads: int, kv_heads: int) -> None:
    want = torch.arange(heads) // (heads // kv_heads) + 1.0
    for rank, (out, counts) in enumerate(pool.run(world, f"{HERE}:called", heads, kv_heads, limit=LIMIT)):
        rows = len(range(ROWS)[rank * ROWS // world : (rank + 1) * ROWS // world])
        torch.testing.assert_close(out, want[:, None].expand(1, rows, heads, 8), atol=1e-6, rtol=0)
        assert counts["all_to_all_single"] == 2


@pytest.mark.parametrize("world", [2, 4])
def test_a_ratio_that_is_not_whole_is_refused_on_every_rank_before_anything_is_sent(pool: Pool, world: int) -> None:
    answers = pool.run(world, f"{HERE}:called", 6, 4, limit=LIMIT)
    texts = {text for text, _ in answers}
    assert len(texts) == 1, "one message"
    (text,) = texts
    assert all(word in text for word in ("6", "4", "multiple"))
    assert all(set(counts) <= {"agreement"} for _, counts in answers)
