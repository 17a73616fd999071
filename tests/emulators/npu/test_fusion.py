"""npu_fusion_attention's stand-in: right numbers in every layout and mode, and what it leaves unwritten."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from tests.emulators.npu.fusion import npu_fusion_attention, npu_fusion_attention_grad
from tests.emulators.npu.stack import LintError, using

pytestmark = pytest.mark.emulated

CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
B, N, NK, SQ, SK, D, DV, SCALE = 2, 4, 2, 5, 7, 16, 8, 0.3


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def qkv(queries: int = SQ, keys: int = SK, batch: int = B) -> tuple[torch.Tensor, ...]:
    """BSND."""
    return drawn(batch, queries, N, D), drawn(batch, keys, NK, D), drawn(batch, keys, NK, DV)


def call(*tensors: torch.Tensor, layout: str = "BSND", **asked):
    return npu_fusion_attention(*tensors, N, layout, scale=SCALE, **asked)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=1e-5, rtol=1e-5)


FROM_BSND = {
    "BSND": lambda t: t,
    "BNSD": lambda t: t.transpose(1, 2),
    "BSH": lambda t: t.flatten(2),
    "SBH": lambda t: t.flatten(2).transpose(0, 1),
}


@pytest.mark.parametrize("layout", FROM_BSND)
@pytest.mark.parametrize("keys", [SK, 3])
def test_causal_is_bottom_right_and_the_statistics_are_the_lse(layout: str, keys: int) -> None:
    q, k, v = qkv(keys=keys)
    place = FROM_BSND[layout]
    out, maximum, total, *rest = call(
        *map(place, (q, k, v)), layout=layout, atten_mask=CAUSAL, sparse_mode=3, inner_precise=2
    )
    want, lse = pa.reference_attention(q, k, v, causal=True, scale=SCALE, return_lse=True)
    close(out, place(want))
    seen = lse.isfinite()
    close((maximum + total.log())[..., 0][seen], lse[seen])
    assert maximum[..., 7][~seen].eq(-torch.finfo(torch.float32).max).all()
    assert total[..., 7][~seen].eq(torch.finfo(torch.float32).max).all()
    assert (tuple(rest[0].shape), rest[1:]) == ((0,), [0, 0, 0])


def test_left_up_causal_and_the_band_have_their_own_origins() -> None:
    q, k, v = qkv()
    top_left = torch.ones(SQ, SK, dtype=torch.bool).tril()
    want = pa.reference_attention(q, k, v, structure=pa.Mask.pairs(top_left), scale=SCALE)
    close(call(q, k, v, atten_mask=CAUSAL, sparse_mode=2)[0], want)
    want = pa.reference_attention(q, k, v, window=(2, 1), scale=SCALE)
    close(call(q, k, v, atten_mask=CAUSAL, sparse_mode=4, pre_tockens=2, next_tockens=1)[0], want)


@pytest.mark.parametrize("mode", [0, 1])
@pytest.mark.parametrize("shape", [(B, N, SQ, SK), (B, 1, SQ, SK), (1, 1, SQ, SK), (SQ, SK)])
def test_a_mask_hides_where_it_is_true(mode: int, shape: tuple[int, ...]) -> None:
    q, k, v = qkv()
    drop = drawn(*shape) > 0.4
    drop[..., 0] = False
    want = pa.reference_attention(q, k, v, structure=pa.Mask(~drop.expand(B, N, SQ, SK)), scale=SCALE)
    close(call(q, k, v, atten_mask=drop, sparse_mode=mode)[0], want)
    close(call(q, k, v, atten_mask=drop.byte(), sparse_mode=mode)[0], want)


def test_a_row_that_sees_nothing_is_the_mean_of_v_or_zero_with_inner_precise_2() -> None:
    q, k, v = qkv()
    drop = torch.zeros(SQ, SK, dtype=torch.bool)
    drop[1] = True
    out, maximum, total, *_ = call(q, k, v, atten_mask=drop, sparse_mode=1)
    close(out[:, 1], v.mean(1).repeat_interleave(N // NK, 1))
    assert maximum[:, :, 1].eq(-torch.finfo(torch.float32).max).all()
    assert total[:, :, 1].eq(SK).all()
    assert call(q, k, v, atten_mask=drop, sparse_mode=1, inner_precise=2)[0][:, 1].eq(0).all()


def test_prefix_modes() -> None:
    q, k, v = qkv()
    prefix = [4, 6]
    see = torch.stack([torch.ones(SQ, SK).tril(SK - SQ).bool() | (torch.arange(SK) < n) for n in prefix])[:, None]
    want = pa.reference_attention(q, k, v, structure=pa.Mask(see), scale=SCALE)
    close(call(q, k, v, atten_mask=~see, sparse_mode=5, prefix=prefix)[0], want)
    lower = torch.zeros(1024, 2048, dtype=torch.bool)
    lower[:, 1024:] = True
    mask = torch.cat([CAUSAL, lower])
    close(call(q, k, v, atten_mask=mask, sparse_mode=6, prefix=prefix)[0], want)


def test_packed_documents_stay_apart_and_rows_past_the_last_are_unwritten() -> None:
    q, k, v = drawn(8, N, D), drawn(10, NK, D), drawn(10, NK, DV)
    lengths = {"actual_seq_qlen": [2, 2, 5], "actual_seq_kvlen": [3, 5, 9]}
    packed = pa.Packed.from_lengths([2, 0, 3], [3, 2, 4])
    for causal, asked in ((False, {}), (True, {"atten_mask": CAUSAL, "sparse_mode": 3})):
        out, maximum, total, *_ = call(q, k, v, layout="TND", softmax_layout="TND", **lengths, **asked)
        want, lse = pa.reference_attention(
            q[:5], k[:9], v[:9], structure=packed, causal=causal, scale=SCALE, return_lse=True
        )
        close(out[:5], want)
        close((maximum + total.log())[:5, :, 0], lse.T)
        assert out[5:].isnan().all()
        assert maximum[5:].isnan().all()
        plain = call(q, k, v, layout="TND", **lengths, **asked)[1]
        close(plain[2:5].reshape(N, 3, 8), maximum[2:5].transpose(0, 1))


def test_a_falling_end_is_an_empty_document() -> None:
    q = drawn(5, N, D)
    one = call(q, q, q, layout="TND", actual_seq_qlen=[2, 5, 0], actual_seq_kvlen=[2, 5, 0])[0]
    two = call(q, q, q, layout="TND", actual_seq_qlen=[2, 5], actual_seq_kvlen=[2, 5])[0]
    assert torch.equal(one, two)


def test_a_bias_is_added_before_the_scale_and_minus_infinity_in_it_is_nan() -> None:
    q, k, v = qkv()
    bias = drawn(B, N, SQ, SK)
    want = pa.reference_attention(q, k, v, structure=pa.Mask(bias.double() * SCALE), scale=SCALE)
    close(call(q, k, v, pse=bias)[0], want)
    bias[0, 0, 0, 0] = float("-inf")
    assert call(q, k, v, pse=bias)[0][0, 0, 0].isnan().all()
    with using(lint=True), pytest.raises(LintError, match="pse"):
        call(q, k, v, pse=bias)


def test_a_sink_takes_weight_and_gives_no_value() -> None:
    q, k, v = qkv()
    sink = drawn(N)
    lse = pa.reference_attention(q, k, v, scale=SCALE, return_lse=True)[1]
    share = torch.sigmoid(lse - sink[None, :, None]).transpose(1, 2)[..., None]
    close(call(q, k, v, sink=sink)[0], pa.reference_attention(q, k, v, scale=SCALE) * share)


def test_strided_inputs_are_taken_and_nothing_is_modified() -> None:
    q, k, v = qkv()
    odd = [torch.stack([t, t], -1)[..., 0] for t in (q, k, v)]
    before = [t.clone() for t in odd]
    assert torch.equal(call(*odd)[0], call(q, k, v)[0])
    assert all(torch.equal(t, kept) for t, kept in zip(odd, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_have_the_dtype_of_the_query(dtype: torch.dtype) -> None:
    q, k, v = (t.to(dtype) for t in qkv())
    out = call(q, k, v)[0]
    assert out.dtype == dtype
    assert torch.equal(out, pa.reference_attention(q, k, v, scale=SCALE).to(dtype))


def test_the_gradient_is_attention_s() -> None:
    q, k, v = qkv()
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    want = pa.reference_attention(*leaves, causal=True, scale=SCALE)
    dy = drawn(*want.shape)
    want.backward(dy.double())
    asked = {"atten_mask": CAUSAL, "sparse_mode": 3}
    out, maximum, total, *_ = call(q, k, v, **asked)
    known = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out}
    grads = npu_fusion_attention_grad(q, k, v, dy, N, "BSND", scale_value=SCALE, **asked, **known)
    for got, leaf in zip(grads, leaves, strict=False):
        close(got, leaf.grad)
    with pytest.raises(RuntimeError, match="161001"):
        npu_fusion_attention_grad(q, k, v, dy, N, "BSND", scale_value=SCALE, **asked)


def test_without_a_mask_every_mode_is_full_attention() -> None:
    q, k, v = qkv()
    want = pa.reference_attention(q, k, v, scale=SCALE)
    close(call(q, k, v, sparse_mode=3)[0], want)
    close(call(q, k, v, pre_tockens=0, next_tockens=0)[0], want)
    with using(lint=True), pytest.raises(LintError, match="full attention"):
        call(q, k, v, sparse_mode=3)
