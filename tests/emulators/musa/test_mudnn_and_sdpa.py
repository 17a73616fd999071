"""What torch_musa's flash op and its SDPA must reproduce: answers, refusals, and what no source says."""

from __future__ import annotations

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.musa import mudnn, sdpa
from tests.emulators.musa.stack import LintError, using

pytestmark = pytest.mark.emulated


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cu(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, causal=False, **asked):
    return mudnn.forward(q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, **asked)[:2]


def test_documents_stay_apart_and_their_lse_is_padded():
    q, k = drawn(5, 4, 64), drawn(7, 2, 64)
    out, lse = varlen(q, k, k, cu(0, 3, 5), cu(0, 4, 7), 3, 4)
    assert lse.shape == (2, 4, 3)
    for index, (rows, keys) in enumerate(((slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 7)))):
        one = (t[None].double() for t in (q[rows], k[keys], k[keys]))
        want, want_lse = reference_attention(*one, return_lse=True)
        close(out[rows], want[0])
        close(lse[index, :, : rows.stop - rows.start], want_lse[0])
    assert lse[1, :, 2].isnan().all()


def test_a_batch_has_heads_first_unlike_cudas():
    q, k = drawn(2, 4, 5, 64), drawn(2, 2, 7, 64)
    out, lse, *_ = mudnn.forward(q, k, k, None, None, 5, 7, 0.0, False, False)
    want = reference_attention(*(t.transpose(1, 2).double() for t in (q, k, k)), return_lse=True)
    close(out.transpose(1, 2), want[0])
    close(lse, want[1])


def test_rows_that_see_nothing_and_rows_of_no_document_are_nan():
    q, k = drawn(6, 2, 64), drawn(3, 2, 64)
    out, _ = varlen(q, k, k, cu(0, 2, 5), cu(0, 0, 3), 3, 3)
    assert out[:2].isnan().all()
    assert out[2:5].isfinite().all()
    assert out[5].isnan().all()


def test_causal_over_other_lengths_is_of_unknown_alignment():
    q, k = drawn(3, 2, 64), drawn(5, 2, 64)
    with using(lint=True), pytest.raises(LintError, match="causal over 3 queries and 5 keys"):
        varlen(q, k, k, cu(0, 3), cu(0, 5), 3, 5, causal=True)
    out, _ = varlen(q, q, q, cu(0, 3), cu(0, 3), 3, 3, causal=True)
    close(out, reference_attention(*(q[None].double() for _ in range(3)), causal=True)[0])


@pytest.mark.parametrize(
    ("said", "asked"),
    [
        ("window_size_left", {"window_size_left": 1}),
        ("window_size_right", {"window_size_right": 0}),
        ("alibi_slopes", {"alibi_slopes": torch.ones(2)}),
        ("no block_table", {"block_table": cu(0)[None]}),
        ("reach outside", {"cu": cu(0, 9)}),
        ("no document", {"cu": cu(0)}),
        ("must be both set", {"cu_k": None}),
    ],
)
def test_the_op_refuses(said, asked):
    q = drawn(4, 2, 64)
    bounds = asked.pop("cu", cu(0, 4))
    with pytest.raises(RuntimeError, match=said):
        varlen(q, q, q, bounds, asked.pop("cu_k", bounds), 4, 4, **asked)


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("no flash kernel", {"dtype": torch.float32}),
        ("head dims 256", {"dim": 256}),
        ("seqused_k is ignored", {"seqused_k": cu(2)}),
        ("int32", {"cu": torch.tensor([0, 4])}),
    ],
)
def test_what_nobody_checks_is_lint(said, change):
    q = drawn(4, 2, change.get("dim", 64), dtype=change.get("dtype", torch.bfloat16))
    bounds = change.get("cu", cu(0, 4))
    with using(lint=True), pytest.raises(LintError, match=said):
        varlen(q, q, q, bounds, bounds, 4, 4, seqused_k=change.get("seqused_k"))


def test_an_old_card_and_an_old_sdk():
    q = drawn(4, 2, 64)
    with using(lint=True, card="S80"), pytest.raises(LintError, match=r"mp 2.2"):
        varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4)
    with using(sdk="4.0.0"), pytest.raises(RuntimeError, match="Not support explicit `scale`"):
        varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4, scale=0.5)
    with using(sdk="4.0.0"):
        varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4, scale=64**-0.5)


def test_gradients_of_documents():
    q, k, dout = drawn(5, 4, 64), drawn(7, 2, 64), drawn(5, 4, 64)
    out, lse = varlen(q, k, k, cu(0, 5), cu(0, 7), 5, 7)
    blank = torch.empty(0)
    got = mudnn.backward(dout, q, k, k, out, lse, cu(0, 5), cu(0, 7), 5, 7, 0.0, False, blank, blank)
    exact = [t[None].double().requires_grad_() for t in (q, k, k)]
    want = torch.autograd.grad(reference_attention(*exact), exact, dout[None].double())
    for one, right in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), right[0], atol=5e-2, rtol=0)


def test_a_mask_of_two_axes_is_of_pairs_or_of_samples_and_is_never_broadcast():
    q, k = drawn(2, 4, 3, 64), drawn(2, 4, 5, 64)
    pairs = torch.ones(3, 5, dtype=torch.bool).tril(1)
    close(sdpa.attend(q, k, k, pairs), torch.nn.functional.scaled_dot_product_attention(q, k, k, pairs))
    samples = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]], dtype=torch.bool)
    want = torch.nn.functional.scaled_dot_product_attention(q, k, k, samples[:, None, None])
    close(sdpa.attend(q, k, k, samples), want)
    with pytest.raises(RuntimeError, match=r"should be \[L, S\] or \[N, S\]"):
        sdpa.attend(q, k, k, samples[:1])
    with pytest.raises(RuntimeError, match="expandable"):
        sdpa.attend(q, k, k, pairs.expand(2, 3, 5))
    with pytest.raises(RuntimeError, match="Expected attn_mask dtype"):
        sdpa.attend(q, k, k, torch.zeros(3, 5))


def test_rows_that_a_mask_hides_wholly_are_nan_and_causal_goes_with_no_mask():
    q, k = drawn(1, 2, 3, 64), drawn(1, 2, 3, 64)
    seen = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    seen[..., 1, :] = False
    assert sdpa.attend(q, k, k, seen)[0, :, 1].isnan().all()
    with pytest.raises(RuntimeError, match="is_causal=True"):
        sdpa.attend(q, k, k, seen, is_causal=True)


def test_causal_is_from_the_first_row_where_a_source_says_so():
    q, k = drawn(1, 2, 3, 64), drawn(1, 2, 5, 64)
    with using(lint=True):
        out = sdpa.attend(*(t.float() for t in (q, k, k)), is_causal=True)
        with pytest.raises(LintError, match="where lengths differ"):
            sdpa.attend(q, k, k, is_causal=True)
    close(out[:, :, 0], k[:, :, 0])


@pytest.mark.parametrize(
    ("dtype", "dims", "card", "kernel"),
    [
        (torch.bfloat16, (64, 64), "S5000", "flash"),
        (torch.bfloat16, (192, 128), "S4000", "flash"),
        (torch.bfloat16, (160, 160), "S4000", "flash"),
        (torch.bfloat16, (192, 192), "S5000", "math"),
        (torch.float32, (64, 64), "S5000", "math"),
        (torch.bfloat16, (64, 64), "S80", "math"),
    ],
)
def test_the_kernel_that_a_request_gets(dtype, dims, card, kernel):
    q, v = (drawn(1, 2, 3, dim, dtype=dtype) for dim in dims)
    with using(card=card):
        assert sdpa.chosen(q, q, v, None) == kernel
    assert sdpa.chosen(q, q, v, torch.zeros(3, 3).requires_grad_()) == "math"
