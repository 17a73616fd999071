"""`pa.warmup`: afterwards the calls that requests describe find their plans ready."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn import call

Q = torch.randn(2, 6, 2, 8)
ROWS = torch.randn(12, 2, 8)
VIDEO = pa.VideoLayout((1, 1, 3), prefix=(1, 1), used=6)
POOL = torch.randn(8, 4, 2, 8)
CALLS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "dense": ((Q, Q, Q), {"causal": True, "scale": 0.3}),
    "strided": ((Q[..., ::2], Q[..., ::2], Q[..., ::2]), {}),
    "grad": ((Q.clone().requires_grad_(), Q, Q), {"return_lse": True}),
    "prefix": ((Q, Q, Q), {"structure": pa.KeyPadding.from_lengths([4, 4], 6)}),
    "padding": ((Q, Q, Q), {"structure": pa.KeyPadding.from_lengths([6, 3], 6)}),
    "holes": ((Q, Q, Q), {"structure": pa.KeyPadding.from_ranges([[(1, 6)], [(0, 2), (3, 5)]], 6)}),
    "mask": ((Q, Q, Q), {"structure": pa.Mask(torch.rand(2, 6) > 0.4)}),
    "bias": ((Q, Q, Q), {"structure": pa.Mask(torch.randn(2, 6, 6))}),
    "packed": ((ROWS, ROWS, ROWS), {"structure": pa.Packed.from_lengths([5, 7]), "softcap": 5.0}),
    "cross packed": ((ROWS, ROWS[:9], ROWS[:9]), {"structure": pa.Packed.from_lengths([5, 7], [3, 6])}),
    "spans": ((Q, Q, Q), {"structure": pa.Spans([[(2, 5)], []])}),
    "video": ((Q, Q, Q), {"structure": pa.VideoTiles(VIDEO, (1, 1, 1), topk=2)}),
    "video with a gate": ((Q, Q, Q), {"structure": pa.VideoTiles(VIDEO, (1, 1, 2), sparsity=0.5), "gate": Q}),
    "video run densely": ((Q, Q, Q), {"structure": pa.VideoTiles(VIDEO, (1, 1, 1), topk=3), "gate": Q}),
    "block map": ((Q, Q, Q), {"structure": pa.BlockMap([[[[0, 1], [1, 0]]]], [[[2, 1]]], 3, 4)}),
    "paged": ((Q[:, :2], POOL, POOL), {"structure": pa.Paged([[0, 1], [2, 3]], [7, 5]), "causal": True}),
    "paged rows": ((ROWS[:4], POOL, POOL), {"structure": pa.Paged([[0, 1], [2, 3]], [7, 5], [3, 1])}),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_described_call_is_made_and_the_real_one_finds_the_same_route(name: str) -> None:
    tensors, arguments = CALLS[name]
    request = pa.explain(*tensors, **arguments).request
    with pa.record_routes() as log:
        assert pa.warmup([request, request]) == 1
        pa.attention(*tensors, **arguments)
    assert len({entry.route for entry in log.entries}) == 1
    made = log.entries[0].request
    assert made == str(request)


def test_a_models_layers_are_warmed_with_their_own_choices() -> None:
    model = torch.nn.ModuleList([pa.Attention(2, 8, backend="blocked"), pa.Attention(2, 8, causal=True)])
    padding = pa.KeyPadding.from_lengths([6, 3], 6)
    for layer in model:
        layer(Q, Q, Q, padding)
    with pa.record_routes() as log:
        assert pa.warmup(model) == 2
    assert [entry.route for entry in log.entries] == ["cpu:blocked", "cpu:sdpa"]


def test_a_warm_call_makes_no_new_plan() -> None:
    q = torch.randn(1, 11, 2, 8)
    pa.warmup(pa.explain(q, q, q, scale=0.125).request)
    known = len(call._plans)
    pa.attention(q, q, q, scale=0.125)
    assert len(call._plans) == known


def test_what_cannot_be_warmed_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no attention layer"):
        pa.warmup(torch.nn.ModuleList([pa.Attention(2, 8)]))
    with pytest.raises(TypeError, match="warmup"):
        pa.warmup(["dense"])  # type: ignore[list-item]
