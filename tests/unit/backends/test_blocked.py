"""The plain matmul kernel: softcap, blocks of bounded memory, gradients of an additive mask."""

import math

import pytest
import torch

import polyattn as pa
from polyattn import structures
from polyattn.backends import blocked
from tests.unit.backends.running import assert_equal, batch, expected, run, tokens


@pytest.mark.parametrize("call", [{}, {"causal": True}, {"window": (2, 1)}])
def test_softcap_bends_scores_before_masks(call):
    assert_equal("blocked", *batch(5, 7), softcap=0.7, **call)


def test_softcap_reaches_every_structure():
    packed, padding = structures.Packed.from_lengths([3, 4]), structures.KeyPadding.from_lengths([3, 5], 5)
    assert_equal("blocked", *tokens(7, 7), packed, softcap=0.7)
    assert_equal("blocked", *batch(5, 5), padding, softcap=0.7, causal=True)
    assert_equal("blocked", *batch(5, 5), structures.Spans([[(1, 3)], []]), softcap=0.7)
    assert_equal("blocked", *batch(5, 5), structures.Mask(torch.ones(5, 5).tril()[None] > 0), softcap=0.7)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_blocks_of_rows_change_nothing(monkeypatch, causal, masked):
    monkeypatch.setattr(blocked, "_SCORES", 3 * 2 * 4 * 20)
    structure = structures.Mask((torch.arange(20 * 20).reshape(1, 20, 20) % 3) > 0) if masked else None
    assert_equal("blocked", *batch(20, 20), structure, causal=causal, softcap=0.9)


def test_scores_of_all_rows_never_exist_at_once(monkeypatch):
    monkeypatch.setattr(blocked, "_SCORES", 1 << 12)
    sizes, block = [], blocked._block

    def watched(q, k, v, mask, **call):
        sizes.append(q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2])
        return block(q, k, v, mask, **call)

    monkeypatch.setattr(blocked, "_block", watched)
    q, k, v = batch(100, 128)
    run("blocked", q, k, v, causal=True)
    assert max(sizes) <= 1 << 12
    assert sum(sizes) >= q.shape[0] * q.shape[1] * q.shape[2]


@pytest.mark.parametrize("shape", [(1, 1, 1, 6), (2, 4, 5, 6), (2, 1, 5, 6)])
@pytest.mark.parametrize("call", [{}, {"causal": True}])
def test_an_additive_mask_gets_its_gradient(shape, call):
    q, k, v = batch(5, 6)
    bias = torch.linspace(-1, 1, shape[0] * shape[1] * shape[2] * shape[3], dtype=torch.float64).reshape(shape)

    def gradient(function):
        given = bias.clone().requires_grad_()
        out, _ = function(q, k, v, structures.Mask(given), **call)
        return torch.autograd.grad(out.square().sum(), given)[0]

    mine = gradient(lambda *t, **c: run("blocked", *t, **c))
    torch.testing.assert_close(mine, gradient(expected), atol=1e-9, rtol=0)
    assert mine.abs().max() > 0


def test_the_gradient_of_a_mask_is_fresh_each_time():
    q, k, v = batch(4, 4)
    bias = torch.zeros(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    structure = structures.Mask(bias)
    first, second = (
        torch.autograd.grad(run("blocked", q, k, v, structure, causal=True)[0].square().sum(), bias)[0]
        for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.parametrize("mask", [torch.zeros(3), torch.zeros(3, dtype=torch.bool).logical_not()], ids=["bias", "bool"])
def test_rows_that_see_nothing_are_zero_whatever_they_hold(mask: torch.Tensor) -> None:
    """Causal over fewer keys than queries: the first two see none, and hold NaN."""
    q, k = torch.randn(1, 5, 2, 8), torch.randn(1, 3, 2, 8)
    q[:, :2] = math.nan
    out, lse = pa.attention(q, k, k, structure=pa.Mask(mask), causal=True, backend="blocked", return_lse=True)
    assert not out[:, :2].any()
    assert lse[:, :, :2].isneginf().all()
    assert out[:, 2:].isfinite().all()
