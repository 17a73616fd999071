"""The ring's backward: gradients of keys are on their way while the next step is computed."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, ring_gradient
from tests.distributed.counting import Allocations
from tests.distributed.pool import Pool

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 60.0


def schedule(group: dist.ProcessGroup) -> list[str]:
    """What this rank computes, starts (>) and waits for (<) backward, but for the keys."""
    events: list[str] = []
    started: list[list[Any]] = []
    add, start, finish = ring_gradient._add, ring_gradient.start, ring_gradient.finish

    def added(*args: Any) -> None:
        events.append("compute")
        add(*args)

    def begun(operations: list[Any]) -> list[Any]:
        works = start(operations)
        started.append(works)
        events.append(f">{len(started)}")
        return works

    def finished(works: Any) -> None:
        events.extend(f"<{number + 1}" for number, mine in enumerate(started) if mine is works)
        finish(works)

    q, k, v = (torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3))
    out = pa.attention(q, k, v, parallel=SequenceParallel(ring=dist.get_world_size(group), mesh=group))
    with (
        patch.object(ring_gradient, "_add", added),
        patch.object(ring_gradient, "start", begun),
        patch.object(ring_gradient, "finish", finished),
    ):
        out.sum().backward()
    return events


def test_a_step_is_computed_while_the_gradient_of_the_one_before_travels(pool: Pool) -> None:
    for events in pool.run(4, f"{HERE}:schedule", limit=LIMIT):
        assert events == ["compute", "compute", ">1", "compute", "<1", ">2", "compute", "<2", ">3", "<3"]


def most_bytes(group: dist.ProcessGroup) -> tuple[int, int]:
    """The most bytes held in the backward beside slots and the caller's, and those of a shard of keys in float32."""
    q = torch.randn(1, 1, 4, 16, requires_grad=True)
    k, v = (torch.randn(1, 600, 4, 16, requires_grad=True) for _ in range(2))
    out = pa.attention(q, k, v, parallel=SequenceParallel(ring=dist.get_world_size(group), mesh=group))
    with Allocations() as allocations:
        out.sum().backward()
    return allocations.peak, (k.numel() + v.numel()) * k.element_size()


def test_memory_does_not_grow_with_the_ring(pool: Pool) -> None:
    three, four = (
        max(peak / chunk for peak, chunk in pool.run(world, f"{HERE}:most_bytes", limit=LIMIT)) for world in (3, 4)
    )
    assert four == pytest.approx(three, rel=0.01)
    assert three < 8
