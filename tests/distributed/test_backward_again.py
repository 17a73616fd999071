"""Backward passes that stop short, run again, or make the forward run again; what a graph holds when it is over."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import polyattn as pa
from polyattn.distributed import SequenceParallel, shard
from tests.distributed.pool import Pool
from tests.distributed.test_head_groups import grouped

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 60.0


def checkpointed(group: dist.ProcessGroup, parallel: SequenceParallel, heads: int, rows: int) -> float:
    """How far gradients are from those without a checkpoint."""
    random = torch.Generator().manual_seed(4)
    whole = [torch.randn(1, rows, heads, 8, generator=random) for _ in range(3)]
    plain, again = ([shard(tensor, parallel).clone().requires_grad_() for tensor in whole] for _ in range(2))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = pa.attention(q, k, v, causal=True, parallel=parallel)
        return out

    attend(*plain).sin().sum().backward()
    checkpoint(attend, *again, use_reentrant=False).sin().sum().backward()
    pairs = zip(plain, again, strict=True)
    return max((a.grad - b.grad).abs().max().item() if a.grad.numel() else 0.0 for a, b in pairs)


@pytest.mark.parametrize(
    ("degrees", "heads", "rows"),
    [
        ({"ulysses": 2}, 4, 6),
        ({"ulysses": 2}, 1, 6),
        ({"ring": 2}, 4, 6),
        ({"gather": 2}, 4, 6),
        ({"gather": 2}, 4, (6, 0)),
    ],
    ids=str,
)
def test_all_ranks_run_the_forward_again_also_one_without_heads_or_rows(
    pool: Pool, degrees: dict[str, int], heads: int, rows: Any
) -> None:
    parallel = SequenceParallel(**degrees, rows=rows)
    total = rows if isinstance(rows, int) else sum(rows)
    for apart in pool.run(2, f"{HERE}:checkpointed", parallel, heads, total, limit=LIMIT):
        assert apart == 0.0


def of_the_joint_alone(group: dist.ProcessGroup) -> bool:
    """Gradients of all, before and after one that needs none of the shards."""
    q = torch.randn(1, 6, 6, 8, requires_grad=True)
    text = torch.randn(1, 2, 6, 8, requires_grad=True)
    with grouped((1, 1)):
        out = pa.attention(q, q, q, joint=pa.Joint(text, text, text), parallel=SequenceParallel(ulysses=2, mesh=group))
    loss = out.sin().sum()
    one = torch.autograd.grad(loss, [q, text], retain_graph=True)
    (part,) = torch.autograd.grad(loss, [text], retain_graph=True)
    two = torch.autograd.grad(loss, [q, text])
    return all(torch.equal(a, b) for a, b in zip((*one, one[1]), (*two, part), strict=True))


def test_a_backward_that_needs_no_shard_leaves_the_next_one_whole(pool: Pool) -> None:
    assert pool.run(2, f"{HERE}:of_the_joint_alone", limit=LIMIT) == [True, True]


def kept(group: dist.ProcessGroup) -> bool:
    """Whether the gradient of the answer outlives the backward, while the answer is still held."""
    q = torch.randn(1, 6, 6, 8, requires_grad=True)
    with grouped((1, 1)):
        out = pa.attention(q, q, q, parallel=SequenceParallel(ulysses=2, mesh=group))
    found: list[Any] = []
    out.register_hook(lambda grad: found.append(weakref.ref(grad)))
    out.sin().sum().backward()
    assert out.grad_fn is not None
    return found[0]() is not None


def test_a_graph_whose_backward_is_over_holds_no_gradient(pool: Pool) -> None:
    assert pool.run(2, f"{HERE}:kept", limit=LIMIT) == [False, False]
