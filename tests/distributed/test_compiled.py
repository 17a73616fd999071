"""torch.compile: calls over ranks stand between graphs, equal to eager ones; one graph of all is refused and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, gather, shard
from tests.distributed.pool import Pool

HERE = __name__
#: Seconds, hard, for one test: the compiler is loaded.
LIMIT = 100.0


class Graphs:
    """A Dynamo backend that counts graphs and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.count += 1
        return module.forward


def between_graphs(group: dist.ProcessGroup, degrees: dict[str, int]) -> tuple[int, int, bool]:
    """Graphs of the first call, graphs of the second, and whether answers and gradients are the eager ones."""
    torch._dynamo.reset()
    parallel = SequenceParallel(**degrees, mesh=group).holding(9)
    layer = pa.Attention(2, 8, parallel=parallel)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = pa.attention(x * 2, x, x + 1, causal=True, parallel=parallel) * 0.5
        return layer(y, y, y) + x

    whole = torch.randn(1, 9, 2, 8)
    graphs = Graphs()
    compiled = torch.compile(model, backend=graphs)
    inputs = [shard(whole, parallel).clone().requires_grad_() for _ in range(3)]
    first, counted = compiled(inputs[0]), graphs.count
    second, again = compiled(inputs[1]), graphs.count - counted
    eager = model(inputs[2])
    for out in (first, second, eager):
        out.sin().sum().backward()
    same = [
        torch.equal(out, eager) and torch.equal(x.grad, inputs[2].grad)
        for out, x in zip((first, second), inputs[:2], strict=True)
    ]
    return counted, again, all(same)


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}], ids=str)
def test_calls_over_ranks_stand_between_graphs(pool: Pool, degrees: dict[str, int]) -> None:
    for counted, again, same in pool.run(2, f"{HERE}:between_graphs", degrees, limit=LIMIT):
        assert counted >= 3, "before, between and behind the two calls"
        assert again == 0, "the second call compiles nothing"
        assert same


def shards_of_a_graph(group: dist.ProcessGroup) -> bool:
    torch._dynamo.reset()
    parallel = SequenceParallel(ulysses=2, mesh=group)

    def model(x: torch.Tensor) -> torch.Tensor:
        mine = shard(x * 2, parallel)
        return gather(mine + 1, parallel, rows=7)

    x = torch.randn(1, 7, 3)
    return torch.equal(torch.compile(model, backend=Graphs())(x), x * 2 + 1)


def test_shard_and_gather_stand_between_graphs(pool: Pool) -> None:
    assert pool.run(2, f"{HERE}:shards_of_a_graph", limit=LIMIT) == [True, True]


def in_one_graph(group: dist.ProcessGroup) -> str:
    torch._dynamo.reset()
    layer = pa.Attention(2, 8, parallel=SequenceParallel(ulysses=2, mesh=group))
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(RuntimeError) as caught:
        torch.compile(lambda x: layer(x, x, x), backend=Graphs(), fullgraph=True)(x)
    assert layer(x, x, x).shape == x.shape  # the ranks are still together
    return str(caught.value)


def test_one_graph_of_all_is_refused_with_the_reason_on_every_rank(pool: Pool) -> None:
    for text in pool.run(2, f"{HERE}:in_one_graph", limit=LIMIT):
        assert "ranks communicate outside of compiled graphs" in text
