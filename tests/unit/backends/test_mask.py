"""Mask and bias slots: every rank, hidden keys that hold NaN, empty rows, additive entries of any dtype, positions."""

import pytest
import torch

from polyattn import structures
from polyattn.backends.declarations import TOLERANCES
from tests.unit.backends.running import IMPLEMENTATIONS, WITH_LSE, assert_equal, batch, expected, gradients, run

TORN = [name for name in IMPLEMENTATIONS if name.startswith("cpu")]


def pattern(*shape):
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) * 7 % 5) > 1


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("shape", [(6,), (2, 6), (2, 5, 6), (1, 4, 5, 6), (2, 1, 5, 6), (2, 4, 1, 6), (2, 4, 5, 6)])
@pytest.mark.parametrize("call", [{}, {"causal": True}, {"window": (2, 1)}])
@pytest.mark.parametrize("additive", [False, True])
def test_every_rank(implementation, shape, call, additive):
    mask = pattern(*shape)
    if additive:
        mask = torch.where(mask, torch.linspace(-1, 1, mask.numel()).reshape(shape), float("-inf"))
    assert_equal(implementation, *batch(5, 6), structures.Mask(mask), **call)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("mask", [
    torch.tensor([[[True, True, False], [False, False, False]]]),
    torch.tensor([[[0, 0, -torch.inf], [-torch.inf, -torch.inf, -torch.inf]]]),
    torch.tensor([[[0, 0, -torch.inf], [torch.finfo(torch.float16).min * 2] * 3]], dtype=torch.float16),
    torch.tensor([[[0, 0, torch.finfo(torch.float32).min], [torch.finfo(torch.float32).min] * 3]]),
])  # fmt: skip
def test_a_row_that_sees_nothing_is_zero(implementation, mask):
    """fault_cases row 7."""
    q, k = torch.zeros(1, 2, 1, 4), torch.zeros(1, 3, 1, 4)
    v = torch.tensor([2.0, 4.0, 8.0]).reshape(1, 3, 1, 1)
    need = implementation in WITH_LSE
    out, lse = run(implementation, q, k, v, structures.Mask(mask), need_lse=need)
    assert out.flatten().tolist() == [3.0, 0.0]
    if need:
        assert lse.flatten().tolist() == pytest.approx([0.6931472, -torch.inf])
    for gradient in gradients(lambda *t: run(implementation, *t, structures.Mask(mask))[0], q, k, v):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shape", [(6,), (2, 6)])
def test_keys_that_no_query_may_see_may_hold_nan(implementation, additive, shape):
    mask = torch.ones(shape, dtype=torch.bool)
    mask[..., [1, 4]] = False
    structure = structures.Mask(torch.zeros(shape).masked_fill(~mask, float("-inf")) if additive else mask)
    q, k, v = batch(5, 6)
    want, _ = expected(q, k, v, structure)
    k[:, [1, 4]] = v[:, [1, 4]] = float("nan")
    before = k.clone()
    torch.testing.assert_close(run(implementation, q, k, v, structure)[0], want, atol=1e-9, rtol=0)
    for gradient in gradients(lambda *t: run(implementation, *t, structure)[0], q, k, v):
        assert gradient.isfinite().all()
    torch.testing.assert_close(k, before, equal_nan=True, atol=0, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_nothing_may_hold_nan(implementation):
    structure = structures.Mask(torch.tensor([[[True, True], [False, False], [True, False]]]))
    q, k, v = batch(3, 2)
    want, _ = expected(q, k, v, structure)
    q[:, 1] = float("nan")
    torch.testing.assert_close(run(implementation, q, k, v, structure)[0], want, atol=1e-9, rtol=0)
    for gradient in gradients(lambda *t: run(implementation, *t, structure)[0], q, k, v):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_mask_and_causal_hide_together_may_hold_nan(implementation):
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[2:, 2] = False  # causal hides key 2 from rows 0 and 1, the mask from the others
    structure = structures.Mask.pairs(mask)
    q, k, v = batch(4, 4)
    want, _ = expected(q, k, v, structure, causal=True)
    k[:, 2] = v[:, 2] = float("nan")
    torch.testing.assert_close(run(implementation, q, k, v, structure, causal=True)[0], want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("implementation", TORN)
def test_a_key_hidden_from_the_heads_that_read_it_may_hold_nan(implementation):
    mask = torch.ones(1, 4, 1, 3, dtype=torch.bool)
    mask[:, :2, :, 1] = False  # query heads 0 and 1 read KV head 0
    structure = structures.Mask(mask)
    q, k, v = batch(2, 3)
    want, _ = expected(q, k, v, structure)
    k[:, 1, 0] = v[:, 1, 0] = float("nan")
    torch.testing.assert_close(run(implementation, q, k, v, structure)[0], want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_large_finite_entry_never_hides_a_key_by_overflow(implementation):
    q, k, v = batch(2, 3, dtype=torch.float16)
    bias = torch.full((1, 1, 1, 3), -1e5)  # float16 ends at -65504
    out, _ = run(implementation, torch.zeros_like(q), k, v, structures.Mask(bias))
    even, _ = run(implementation, torch.zeros_like(q), k, v)
    assert torch.equal(out, even)
    assert out.abs().max() > 0


#: Entries of float32 that halves do not tell apart, or do not hold: a row each, and one that also hides a key.
FINE = {
    "digits": [-300.0, -300.4, -301.0, -300.0],
    "range below": [-65520.0, -65521.0, -65520.5, -65520.0],
    "range above": [65520.0, 65521.0, 65520.5, -torch.inf],
    "in common": [-1e9, -1e9, -1e9, -1e9],
    "far apart": [-1e5, 0.0, 0.7, -3e38],
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("entries", FINE)
@pytest.mark.parametrize("call", [{}, {"causal": True}])
def test_entries_that_q_s_dtype_does_not_hold_count_all_the_same(implementation, dtype, entries, call):
    bias = torch.stack([torch.tensor(FINE[entries]).roll(turn) for turn in range(3)]).expand(2, 1, 3, 4)
    q, k, v = batch(3, 4, dtype=dtype)
    structure = structures.Mask(bias)
    want, want_lse = expected(q.double(), k.double(), v.double(), structure, **call)
    has_lse = implementation in WITH_LSE
    got, lse = run(implementation, q, k, v, structure, need_lse=has_lse, **call)
    torch.testing.assert_close(got.double(), want, atol=TOLERANCES[str(dtype).removeprefix("torch.")], rtol=0)
    if has_lse:
        torch.testing.assert_close(lse.double(), want_lse.double(), atol=2e-2, rtol=1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_derived_mask_is_shared_by_layers(implementation):
    structure = structures.Mask(pattern(2, 5, 6))
    q, k, v = batch(5, 6)
    run(implementation, q, k, v, structure, causal=True)
    kept = dict(structure.bind(q.device, q.shape, k.shape)._derived)
    run(implementation, q, k, v, structure, causal=True)
    again = structure.bind(q.device, q.shape, k.shape)._derived
    assert kept.keys() == again.keys()
    assert all(again[key] is value for key, value in kept.items())
