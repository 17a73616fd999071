"""Slots that write into their buffer: pieces go straight to their rows, and nothing is put together afterwards."""

from __future__ import annotations

import pytest
import torch

from polyattn import KeyPadding, Spans, reference_attention
from polyattn.backends import generic
from polyattn.compositions.segments import spans_into
from polyattn.compositions.slice import prefix_into

CALL = {"causal": False, "scale": 0.3, "window": None, "softcap": 0.0, "need_lse": True, "options": ()}


class Writing:
    """A dense slot that insists on a buffer, and remembers where it wrote."""

    def __init__(self) -> None:
        self.places: list[int] = []

    def __call__(self, q, k, v, out, **call):
        assert out is not None
        self.places.append(out.data_ptr())
        return generic.blocked_dense(q, k, v, out, **call)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize(
    "full", [[[(1, 4)], [(1, 4)], [(1, 4)]], [[(1, 4)], [(0, 6)], [(1, 4)]], [[], [(2, 3), (5, 9)], []]]
)
def test_spans_piece_by_piece(full, given):
    q, k, v = (drawn(3, 9, 2, 8) for _ in range(3))
    structure = Spans(full)
    out = torch.full_like(q, float("nan")) if given else None
    slot = Writing()
    meta = structure.bind(q.device, q.shape, k.shape)
    result, lse = spans_into(slot, q, k, v, out, meta=meta, **CALL | {"causal": True})
    want, want_lse = reference_attention(q, k, v, structure=structure, scale=0.3, return_lse=True)
    torch.testing.assert_close(result, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, want_lse.float())
    assert out is None or result is out
    first, last = result.data_ptr(), result.data_ptr() + result.numel() * result.element_size()
    assert all(first <= place < last for place in slot.places)


@pytest.mark.parametrize("queries", ["same", "all"])
@pytest.mark.parametrize("length", [0, 5, 9])
def test_a_prefix_in_place(length, queries):
    q, k, v = (drawn(2, 9, 2, 8) for _ in range(3))
    structure = KeyPadding.from_lengths([length] * 2, 9, queries=queries)
    meta = structure.bind(q.device, q.shape, k.shape)
    slot = Writing() if queries == "same" else generic.blocked_dense
    result, lse = prefix_into(slot, q, k, v, None, meta=meta, **CALL)
    want, want_lse = reference_attention(q, k, v, structure=structure, scale=0.3, return_lse=True)
    torch.testing.assert_close(result, want, atol=1e-9, rtol=0)
    torch.testing.assert_close(lse, want_lse.float())


def test_gradients_take_the_way_that_autograd_follows():
    q, k, v = (drawn(2, 9, 2, 8).requires_grad_() for _ in range(3))
    structure = KeyPadding.from_lengths([5, 5], 9)
    meta = structure.bind(q.device, q.shape, k.shape)
    result, _ = prefix_into(generic.blocked_dense, q, k, v, None, meta=meta, **CALL | {"need_lse": False})
    assert torch.autograd.grad(result.sum(), v)[0].abs().sum() > 0
