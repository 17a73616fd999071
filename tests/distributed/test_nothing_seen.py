"""Calls in which no query sees a key: zeros, LSE -inf and zero gradients under every strategy, as on one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel
from tests.distributed.pool import Pool

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 60.0


def attended(group: dist.ProcessGroup, degrees: dict[str, int], batch: int, keys: int, arguments: Any) -> list[bool]:
    """Whether the answer, the LSE and each gradient are those of rows that see nothing."""
    q = torch.randn(batch, 3, 4, 8, requires_grad=True)
    k, v = (torch.randn(batch, keys, 2, 8, requires_grad=True) for _ in range(2))
    out, lse = pa.attention(q, k, v, return_lse=True, parallel=SequenceParallel(**degrees, mesh=group), **arguments)
    (out.sum() + lse.masked_fill(lse.isinf(), 0.0).sum()).backward()
    grads = [tensor.grad is not None and not tensor.grad.any() for tensor in (q, k, v)]
    return [out.shape == q.shape, not out.any(), bool((lse == float("-inf")).all()), *grads]


@pytest.mark.parametrize(
    "degrees", [{"ulysses": 3}, {"ring": 3}, {"gather": 3}, {"ranks": 3}], ids=lambda degrees: next(iter(degrees))
)
@pytest.mark.parametrize(
    ("batch", "keys", "arguments"),
    [
        (0, 3, {}),
        (0, 3, {"causal": True}),
        (2, 0, {}),
        (2, 0, {"causal": True}),
        (2, 0, {"window": (None, 1)}),
        (2, 0, {"window": 1}),
    ],
    ids=str,
)
def test_zeros_and_zero_gradients(
    pool: Pool, degrees: dict[str, int], batch: int, keys: int, arguments: dict[str, Any]
) -> None:
    for right in pool.run(3, f"{HERE}:attended", degrees, batch, keys, arguments, limit=LIMIT):
        assert all(right), right
