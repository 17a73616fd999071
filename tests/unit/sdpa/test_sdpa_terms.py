"""What SDPA's mask and causal flag mean: the same visibility as torch's, in the cheapest structure that says it."""

from __future__ import annotations

import gc

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyattn as pa
from polyattn.integrations.sdpa_terms import structure_of, terms
from tests.unit.test_no_host_read import Trap

BATCH, HEADS, ROWS, KEYS = 2, 4, 5, 7
CLOSE = {"atol": 1e-5, "rtol": 0.0}


@pytest.fixture
def qkv():
    torch.manual_seed(0)
    return [torch.randn(BATCH, length, HEADS, 8) for length in (ROWS, KEYS, KEYS)]


def sdpa(q, k, v, **stated):
    rows_second = (t.transpose(1, 2) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(*rows_second, **stated).transpose(1, 2)


def ours(q, k, v, mask=None, is_causal=False):
    k, v, structure, causal = terms(q, k, v, mask, is_causal)
    return pa.attention(q, k, v, structure=structure, causal=causal)


class TestMasks:
    @pytest.mark.parametrize("additive", [True, False])
    @pytest.mark.parametrize(
        "shape",
        [
            (ROWS, KEYS), (1, KEYS), (ROWS, 1), (HEADS, ROWS, KEYS), (1, ROWS, KEYS), (HEADS, 1, KEYS),
            (BATCH, HEADS, ROWS, KEYS), (BATCH, 1, ROWS, KEYS), (BATCH, HEADS, 1, KEYS), (BATCH, 1, 1, KEYS),
            (1, 1, 1, KEYS), (1, 1, 1, 1),
        ],
        ids=str,
    )  # fmt: skip
    def test_every_shape_that_broadcasts_means_what_torch_says(self, qkv, shape, additive):
        mask = torch.randn(shape) if additive else torch.rand(shape) > 0.4
        if not additive:
            mask[..., 0] = True
        torch.testing.assert_close(ours(*qkv, mask), sdpa(*qkv, attn_mask=mask), **CLOSE)

    @pytest.mark.parametrize("shape", [(1, KEYS), (BATCH, 1, 1, KEYS), (1, 1, 1, KEYS)], ids=str)
    def test_a_boolean_mask_over_keys_alone_is_key_padding_that_keeps_every_query(self, qkv, shape):
        structure = structure_of(torch.rand(shape) > 0.4, *qkv[:2])
        assert isinstance(structure, pa.KeyPadding)
        assert structure.queries == "all"
        assert structure.keep.shape == (BATCH, KEYS)

    @pytest.mark.parametrize("shape", [(BATCH, 1, 1, KEYS + 1), (3, 1, 1, KEYS), (KEYS, ROWS), (1, 1, 1, 1, KEYS)])
    def test_a_shape_that_does_not_broadcast_is_refused_with_both_shapes(self, qkv, shape):
        with pytest.raises(ValueError, match=r"attn_mask.*B=2, H=4, Sq=5, Sk=7") as refused:
            ours(*qkv, torch.ones(shape, dtype=torch.bool))
        assert str(list(shape)) in str(refused.value)

    def test_a_mask_beside_the_causal_flag_is_refused_as_torchs_documentation_says(self, qkv):
        with pytest.raises(ValueError, match="attn_mask, is_causal"):  # some of torch's kernels take both, others raise
            ours(*qkv, torch.ones(ROWS, KEYS, dtype=torch.bool), is_causal=True)

    def test_a_mask_that_wants_a_gradient_gets_torchs(self, qkv):
        gradients = []
        for attend in (lambda mask: ours(*qkv, mask), lambda mask: sdpa(*qkv, attn_mask=mask)):
            torch.manual_seed(1)
            mask = torch.randn(HEADS, ROWS, KEYS, requires_grad=True)
            attend(mask).square().sum().backward()
            gradients.append(mask.grad)
        torch.testing.assert_close(*gradients, **CLOSE)


class TestCausal:
    @pytest.mark.parametrize("rows", [3, KEYS, 12])
    def test_the_triangle_is_torchs_and_starts_at_the_top_left(self, rows):
        torch.manual_seed(0)
        q, k = torch.randn(2, rows, 2, 8), torch.randn(2, KEYS, 2, 8)
        torch.testing.assert_close(ours(q, k, k, is_causal=True), sdpa(q, k, k, is_causal=True), **CLOSE)

    def test_keys_past_the_last_query_are_left_out_and_not_masked(self, qkv):
        k, v, structure, causal = terms(*qkv, None, True)
        assert (k.shape[1], v.shape[1], structure, causal) == (ROWS, ROWS, None, True)


class TestFaultCases:
    """Rows of knowledge/fault_cases.md: q is 0, so that an answer is the mean of the visible values."""

    def rows(self, out):
        return out[..., 0, 0].tolist()

    def test_4_a_key_mask_is_not_applied_to_the_query(self):
        v = torch.tensor([[1.0, 3, 9], [5, 7, 9]])[..., None, None].expand(2, 3, 2, 8)
        keep = torch.tensor([[True, True, False], [True, False, False]])[:, None, None]
        for queries in (4, 3):
            out = ours(torch.zeros(2, queries, 2, 8), v, v, keep)
            assert self.rows(out) == [[2.0] * queries, [5.0] * queries]

    @pytest.mark.parametrize(
        "mask",
        [
            torch.tensor([[True, True, False], [False, False, False]]),
            torch.tensor([[0.0, 0.0, -torch.inf], [-torch.inf] * 3]),
            torch.tensor([[0.0, 0.0, -torch.inf], [torch.finfo(torch.float32).min] * 3]),
        ],
        ids=["bool", "-inf", "finite minimum"],
    )
    def test_7_a_row_that_sees_no_key_is_0_and_so_are_its_gradients(self, mask):
        v = torch.tensor([2.0, 4, 8]).reshape(1, 3, 1, 1).expand(1, 3, 1, 8)
        inputs = [t.clone().requires_grad_() for t in (torch.zeros(1, 2, 1, 8), v, v)]
        out = ours(*inputs, mask)
        assert self.rows(out) == [[3.0, 0.0]]
        out.sum().backward()
        assert all(t.grad.isfinite().all() for t in inputs)
        assert inputs[0].grad[:, 1].eq(0).all()

    def test_10_top_left_is_torchs_and_bottom_right_is_ours(self):
        v = torch.arange(1.0, 6).reshape(1, 5, 1, 1).expand(1, 5, 1, 8)
        q = torch.zeros(1, 2, 1, 8)
        assert self.rows(ours(q, v, v, is_causal=True)) == [[1.0, 1.5]]
        assert self.rows(pa.attention(q, v, v, causal=True)) == [[2.5, 3.0]]


class TestSharing:
    @pytest.mark.parametrize("shape", [(BATCH, 1, 1, KEYS), (BATCH, 1, ROWS, KEYS)])
    def test_layers_share_the_structure_of_one_mask_until_it_changes_or_goes(self, qkv, shape):
        from polyattn.integrations import derived

        gc.collect()
        kept = len(derived._entries)
        mask = torch.ones(shape, dtype=torch.bool)
        first = structure_of(mask, *qkv[:2])
        assert structure_of(mask, *qkv[:2]) is first
        mask[..., 2] = False
        torch.testing.assert_close(ours(*qkv, mask), sdpa(*qkv, attn_mask=mask), **CLOSE)
        del mask
        gc.collect()
        assert len(derived._entries) == kept

    def test_one_mask_may_serve_keys_of_several_lengths(self, qkv):
        q, k, v = qkv
        mask = torch.randn(ROWS, 1)
        for keys in (KEYS, 3):
            out = ours(q, k[:, :keys], v[:, :keys], mask)
            torch.testing.assert_close(out, sdpa(q, k[:, :keys], v[:, :keys], attn_mask=mask), **CLOSE)

    @pytest.mark.parametrize("inference", [True, False])
    @pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16])
    def test_a_mask_on_a_device_is_never_read(self, dtype, inference):
        with FakeTensorMode(), torch.inference_mode(inference), Trap() as trap:
            q = torch.empty(BATCH, ROWS, HEADS, 8, device="cuda")
            mask = torch.ones(BATCH, 1, 1, ROWS, dtype=dtype, device="cuda")
            for _ in range(2):
                structure_of(mask, q, q)
        assert trap.reads == []
        assert trap.copies == []
