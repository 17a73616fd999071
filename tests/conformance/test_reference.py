"""The reference on dense calls: against values computed by hand, and against torch where torch is right."""

import math

import pytest
import torch
import torch.nn.functional as F

from polyattn.reference import reference_attention
from polyattn.structures import Dense, Mask, Packed
from tests.conformance.uniform import INF, answer, normal, rows, zeros


def test_causal_is_bottom_right():
    assert answer(zeros(2), rows(1, 2, 3, 4, 5), causal=True) == pytest.approx([2.5, 3.0])
    assert answer(zeros(5), rows(4, 8), causal=True) == pytest.approx([0, 0, 0, 4, 6])


def test_window_counts_are_inclusive_beside_the_aligned_diagonal():
    v = rows(1, 2, 4, 8, 16)
    assert answer(zeros(5), v, window=(1, 0)) == pytest.approx([1, 1.5, 3, 6, 12])
    assert answer(zeros(5), v, window=(0, 1)) == pytest.approx([1.5, 3, 6, 12, 16])
    assert answer(zeros(2), v, window=(1, 0)) == pytest.approx([6, 12])
    assert answer(zeros(2), v, window=(None, 0)) == answer(zeros(2), v, causal=True)


def test_an_integer_window_looks_both_ways_unless_causal():
    v = rows(1, 2, 4, 8, 16)
    assert answer(zeros(5), v, window=1) == answer(zeros(5), v, window=(1, 1))
    assert answer(zeros(5), v, window=1, causal=True) == answer(zeros(5), v, window=(1, 0))
    with pytest.raises(ValueError, match="-1"):
        answer(zeros(5), v, window=(-1, 0))


def test_softcap_and_scale_change_the_scores_as_written():
    q = torch.tensor([2.0]).reshape(1, 1, 1, 1)
    k = torch.tensor([0.0, 3.0]).reshape(1, 2, 1, 1)
    v = rows(0, 1)

    def sigmoid(x: float) -> float:
        return 1 / (1 + math.exp(-x))

    assert reference_attention(q, k, v).item() == pytest.approx(sigmoid(6))
    assert reference_attention(q, k, v, scale=0.25).item() == pytest.approx(sigmoid(1.5))
    assert reference_attention(q, k, v, scale=0.0).item() == pytest.approx(0.5)
    assert reference_attention(q, k, v, softcap=2.0).item() == pytest.approx(sigmoid(2 * math.tanh(3)))


def test_lse_is_the_natural_log_of_the_summed_scores():
    q, k, v = normal(2, 3, 4, 8), normal(2, 5, 4, 8, seed=1), normal(2, 5, 4, 8, seed=2)
    _, lse = reference_attention(q, k, v, return_lse=True)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(8)
    assert lse.shape == (2, 4, 3)
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_equals_torch(kv_heads, causal):
    q, k, v = normal(2, 6, 4, 8), normal(2, 6, kv_heads, 8, seed=1), normal(2, 6, kv_heads, 5, seed=2)
    expected = F.scaled_dot_product_attention(
        *(t.transpose(1, 2) for t in (q, k, v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(reference_attention(q, k, v, causal=causal), expected)


def test_query_head_h_uses_kv_head_h_div_group():
    v = torch.arange(2.0).reshape(1, 1, 2, 1)
    out = reference_attention(torch.zeros(1, 1, 6, 4), torch.zeros(1, 1, 2, 4), v)
    assert out.flatten().tolist() == [0, 0, 0, 1, 1, 1]


def test_empty_shapes_give_empty_or_zero_answers():
    for q_shape, k_shape in (((0, 4, 2, 16),) * 2, ((2, 0, 2, 16), (2, 3, 2, 16))):
        out = reference_attention(torch.ones(q_shape), torch.ones(k_shape), torch.ones(k_shape))
        assert out.shape == q_shape
    out, lse = reference_attention(
        torch.ones(1, 3, 2, 16), torch.ones(1, 0, 2, 16), torch.ones(1, 0, 2, 16), return_lse=True
    )
    assert out.eq(0).all()
    assert lse.eq(-INF).all()
    q = torch.ones(0, 2, 16)
    for lengths in ([], [0]):
        assert reference_attention(q, q, q, structure=Packed.from_lengths(lengths)).shape == (0, 2, 16)


def test_strides_do_not_matter():
    head = torch.arange(2.0)[:, None] * 100
    value = (torch.arange(6.0)[:, None, None] * 10 + head + torch.arange(4.0)).reshape(1, 6, 2, 4)
    views = (
        value.transpose(1, 2).contiguous().transpose(1, 2),
        torch.stack((value, value, value), dim=2)[:, :, 1],
        torch.stack((value, value), dim=-1).flatten(-2)[..., ::2],
    )
    for view in views:
        out = reference_attention(torch.zeros(1, 6, 2, 4), view, view)
        torch.testing.assert_close(out[0, 5], torch.tensor([[25.0, 26, 27, 28], [125, 126, 127, 128]]).double())
        assert out.eq(out[:, 5:]).all()


def test_the_answer_has_the_dtype_asked_for_and_a_gradient():
    q = torch.randn(1, 3, 1, 4, dtype=torch.bfloat16, requires_grad=True)
    assert reference_attention(q, q, q).dtype == torch.float64
    assert reference_attention(q, q, q, dtype=torch.float32).dtype == torch.float32
    reference_attention(q, q, q).sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_gradients_are_those_of_the_formula():
    q, k, v = (normal(1, 3, 2, 4, seed=seed).requires_grad_() for seed in range(3))
    masked = Mask.pairs(torch.tensor([[1, 0, 0], [0, 0, 0], [1, 1, 0]]).bool())
    assert torch.autograd.gradcheck(lambda *t: reference_attention(*t, structure=masked, softcap=3.0), (q, k, v))


def test_shapes_that_do_not_fit_are_refused():
    q = torch.zeros(1, 3, 4, 8)
    with pytest.raises(ValueError, match="multiple"):
        reference_attention(q, torch.zeros(1, 3, 3, 8), torch.zeros(1, 3, 3, 8))
    with pytest.raises(ValueError, match="head_dim"):
        reference_attention(q, torch.zeros(1, 3, 4, 6), q)
    with pytest.raises(ValueError, match="batch"):
        reference_attention(q, torch.zeros(2, 3, 4, 8), torch.zeros(2, 3, 4, 8))
    with pytest.raises(ValueError, match="Sk=3"):
        reference_attention(q, q, q, structure=Mask(torch.ones(1, 2)))


def test_dense_is_the_structure_of_a_call_that_names_none():
    q = normal(1, 4, 2, 8)
    assert torch.equal(reference_attention(q, q, q), reference_attention(q, q, q, structure=Dense()))


@pytest.mark.parametrize("common", [-1e9, -1e15, 1e17])
def test_what_all_entries_of_a_row_have_in_common_changes_nothing(common):
    q, k, v = (torch.randn(1, count, 2, 4, dtype=torch.float64) for count in (2, 5, 5))
    shifted = reference_attention(q, k, v, structure=Mask(torch.full((5,), common)))
    ones = reference_attention(q, k, torch.ones_like(v), structure=Mask(torch.full((5,), common)))
    assert torch.allclose(ones, torch.ones_like(ones), atol=1e-6), "weights sum to 1"
    if common == -1e9:  # beyond, the scores' own digits are gone in float64 too
        assert torch.allclose(shifted, reference_attention(q, k, v), atol=1e-5)
