"""What the stand-ins for fa3-fwd and SageAttention must reproduce: the vendor's answers, refusals and known faults."""

from __future__ import annotations

import sys

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.emulators.cuda import fa3_ops, sage

INT32 = torch.int32
NAN = float("nan")


@pytest.fixture
def fwd():
    fa3_ops.install()
    yield torch.ops.fa3_fwd.fwd.default
    fa3_ops.uninstall()


@pytest.fixture(params=["1.0.6", "2.2.0"])
def sageattention(request):
    sage.install(request.param)
    yield sys.modules["sageattention"]
    sage.uninstall()


def drawn(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def cu(*bounds):
    return torch.tensor(bounds, dtype=INT32)


def by_sdpa(q, k, v, **asked):
    """[B,S,H,D] in float64."""
    heads_first = [tensor.double().transpose(1, 2) for tensor in (q, k, v)]
    grouped = q.shape[2] != k.shape[2]
    return scaled_dot_product_attention(*heads_first, enable_gqa=grouped, **asked).transpose(1, 2)


def test_fa3_is_dense_attention(fwd):
    q, k, v = drawn(2, 5, 4, 64), drawn(2, 7, 2, 64), drawn(2, 7, 2, 64)
    out, lse, *_ = fwd(q, k, v, softmax_scale=0.2)
    torch.testing.assert_close(out.double(), by_sdpa(q, k, v, scale=0.2), atol=1e-2, rtol=0)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) * 0.2
    torch.testing.assert_close(lse, scores.logsumexp(-1).float())


def test_fa3_causal_is_bottom_right_and_an_empty_row_is_zero(fwd):
    q, v = torch.zeros(1, 5, 1, 64, dtype=torch.bfloat16), torch.tensor([4.0, 8]).bfloat16()
    values = v.reshape(1, 2, 1, 1).expand(1, 2, 1, 64).contiguous()
    out, lse, *_ = fwd(q, q[:, :2], values, is_causal=True)
    assert out[0, :, 0, 0].tolist() == [0, 0, 0, 4, 6]
    assert lse[0, 0, :3].tolist() == [-torch.inf] * 3


def test_fa3_leaves_rows_past_boundaries_and_lengths_unwritten(fwd):
    q = drawn(9, 1, 64)
    out, lse, *_ = fwd(q, q, q, cu_seqlens_q=cu(0, 4, 6), cu_seqlens_k=cu(0, 4, 6), max_seqlen_q=4, max_seqlen_k=4)
    assert out[6:].isnan().all()
    assert lse[:, 6:].isnan().all()
    assert out[:6].isfinite().all()
    padded = drawn(2, 4, 1, 64)
    out, lse, *_ = fwd(padded, padded, padded, seqused_q=cu(4, 1), seqused_k=cu(4, 1))
    assert out[1, 1:].isnan().all()
    assert lse[1, :, 1:].isnan().all()
    torch.testing.assert_close(out[1, :1], padded[1, :1])


def test_fa3_never_reaches_queries_past_an_understated_length(fwd):
    q = drawn(4, 1, 64)
    out, *_ = fwd(q, q, q, cu_seqlens_q=cu(0, 4), cu_seqlens_k=cu(0, 4), max_seqlen_q=2, max_seqlen_k=4)
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()


def test_fa3_lse_of_documents_and_tensors_without_keys(fwd):
    q, k = drawn(3, 1, 64), drawn(2, 1, 64)
    out, lse, *_ = fwd(q, k, k, cu_seqlens_q=cu(0, 2, 3), cu_seqlens_k=cu(0, 2, 2), max_seqlen_q=2, max_seqlen_k=2)
    assert out[2].eq(0).all()
    assert lse[0, 2] == -torch.inf
    nothing = k[:0]
    asked = {"cu_seqlens_q": cu(0, 3), "cu_seqlens_k": cu(0, 0), "max_seqlen_q": 3, "max_seqlen_k": 0}
    out, lse, *_ = fwd(q, nothing, nothing, **asked)
    assert out.eq(0).all()
    assert lse.eq(torch.inf).all()


@pytest.mark.parametrize("poisoned", [True, False])
def test_fa3_a_value_past_the_end_in_the_same_tile_spoils_the_row(fwd, monkeypatch, poisoned):
    monkeypatch.setattr(fa3_ops, "TAIL_POISON", poisoned)
    q, k = drawn(1, 8, 1, 128), drawn(1, 400, 1, 128)
    for place, reached in ((175, True), (176, False)):
        v = drawn(1, 400, 1, 128)
        v[0, place] = NAN
        out, *_ = fwd(q, k, v, seqused_k=cu(100))
        assert bool(out.isnan().any()) == (reached and poisoned)


def test_fa3_descales_are_per_kv_head_for_queries_too(fwd):
    q, k, v = (drawn(2, 4, heads, 64).to(torch.float8_e4m3fn) for heads in (4, 2, 2))
    descales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
    out, *_ = fwd(q, k, v, q_descale=descales[0], k_descale=descales[1], v_descale=descales[2])
    scaled = [
        tensor.double() * descale.double().repeat_interleave(tensor.shape[2] // 2, 1)[:, None, :, None]
        for tensor, descale in zip((q, k, v), descales, strict=True)
    ]
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), by_sdpa(*scaled), atol=3e-2, rtol=0)


def test_fa3_reads_pages_by_tma_alone(fwd):
    k = drawn(4, 176, 1, 128)
    table = torch.tensor([[2, 0]], dtype=INT32)
    q = drawn(1, 200, 1, 128)
    out, *_ = fwd(q, k, k, page_table=table, seqused_k=cu(200))
    torch.testing.assert_close(
        out.double(), by_sdpa(q, *[torch.cat([k[2], k[0]])[:200].unsqueeze(0)] * 2), atol=1e-2, rtol=0
    )
    with pytest.raises(RuntimeError, match="does not support paged KV"):
        fwd(q[:, :64], k, k, page_table=table, seqused_k=cu(200))
    with pytest.raises(RuntimeError, match="does not support paged KV"):
        fwd(q, k[:, :64], k[:, :64], page_table=table, seqused_k=cu(100))


REFUSED = {
    "does not support FP16": lambda q: {"q": q.half(), "k": q.half(), "v": q.half()},
    "only supports fp16, bf16, and fp8_e4m3": lambda q: {"q": q.float(), "k": q.float(), "v": q.float()},
    "query and key must have the same dtype": lambda q: {"k": q.half()},
    "does not support local attention": lambda q: {"window_size_left": 1},
    "contiguous last dimension": lambda q: {"q": q.transpose(-1, -2).contiguous().transpose(-1, -2)},
    "head dimension at most 256": lambda q: dict.fromkeys("qkv", drawn(1, 4, 2, 264)),
    "multiple of 8": lambda q: dict.fromkeys("qkv", drawn(1, 4, 2, 60)),
    "V headdim is different": lambda q: {"v": drawn(1, 4, 2, 32)[..., :32], **dict.fromkeys("qk", drawn(1, 4, 2, 96))},
    "must divide number of heads": lambda q: dict.fromkeys("kv", drawn(1, 4, 3, 64)),
    "batch_size must be equal": lambda q: dict.fromkeys("kv", drawn(2, 4, 2, 64)),
    "seqused_k must have dtype int32": lambda q: {"seqused_k": torch.tensor([4])},
    "max_seqlen_q must be provided": lambda q: {"cu_seqlens_q": cu(0, 4), "q": q[0]},
    "out must have shape": lambda q: {"out": q[:, :2]},
    "output must have the same dtype": lambda q: {"out": q.float()},
    "num_splits > 256": lambda q: {"num_splits": 257},
    "q_descale must have shape": lambda q: {"q_descale": torch.ones(1, 3)},
}


@pytest.mark.parametrize("text", REFUSED)
def test_fa3_refusals(fwd, text):
    q = drawn(1, 4, 2, 64)
    with pytest.raises(RuntimeError, match=text):
        fwd(**{"q": q, "k": q, "v": q, **REFUSED[text](q)})


def test_fa3_writes_the_buffer_it_is_given(fwd):
    q = drawn(1, 4, 2, 64)
    out = torch.full_like(q, NAN)
    given, *_ = fwd(q, q, q, out=out)
    assert given.data_ptr() == out.data_ptr()
    torch.testing.assert_close(out.double(), by_sdpa(q, q, q), atol=1e-2, rtol=0)


def test_fa3_comes_as_the_wheels_modules(fwd):
    import fa3_fwd._C
    import fa3_fwd_config
    import fa3_fwd_interface

    assert fa3_fwd_config.CONFIG["build_flags"]["FLASHATTENTION_DISABLE_FP16"]
    assert fa3_fwd_interface.fa3_fwd_cuda.fwd.default is fwd
    assert fa3_fwd._C is not None


def test_sage_is_attention_to_within_int8(sageattention):
    q, k, v = drawn(2, 4, 130, 64), drawn(2, 2, 192, 64), drawn(2, 2, 192, 64)
    out = sageattention.sageattn(q, k.clone(), v)
    expected = by_sdpa(*(tensor.transpose(1, 2) for tensor in (q, k, v))).transpose(1, 2)
    error = (out.double() - expected).abs().max()
    assert 1e-4 < error < 0.06
    as_nhd = sageattention.sageattn(*(t.transpose(1, 2).contiguous() for t in (q, k, v)), tensor_layout="NHD")
    torch.testing.assert_close(as_nhd.transpose(1, 2), out)


@pytest.mark.parametrize("keys", [1, 6, 70, 127])
def test_sage_1_counts_the_keys_that_a_last_tile_lacks(sageattention, keys):
    q, k, v = drawn(1, 4, 130, 64), drawn(1, 2, keys, 64), drawn(1, 2, keys, 64)
    lacks = -keys % 64 if sageattention.__version__ == "1.0.6" else 0
    smooth = k - k.mean(dim=2, keepdim=True)
    longer = (torch.cat([rows, rows.new_zeros(1, 2, lacks, 64)], dim=2) for rows in (smooth, v))
    expected = by_sdpa(*(rows.transpose(1, 2) for rows in (q, *longer))).transpose(1, 2)
    found = sageattention.sageattn(q, k.clone(), v).double()
    in_a_document = sageattention.sageattn_varlen(
        *(rows[0].transpose(0, 1).clone() for rows in (q, k, v)), cu(0, 130), cu(0, keys), 130, keys
    )
    torch.testing.assert_close(found, expected, atol=0.15, rtol=0)
    torch.testing.assert_close(in_a_document.transpose(0, 1).double(), expected[0], atol=0.06, rtol=0)
    right = by_sdpa(*(rows.transpose(1, 2) for rows in (q, k, v))).transpose(1, 2)
    assert (((found - right).norm() / right.norm()).item() > 0.05) == (lacks > 1)


def test_sage_1_hides_those_keys_where_it_is_causal(sageattention):
    q = drawn(1, 2, 70, 64)
    out = sageattention.sageattn(q, q.clone(), q.clone(), is_causal=True)
    expected = torch.nn.functional.scaled_dot_product_attention(*[q.double()] * 3, is_causal=True)
    torch.testing.assert_close(out.double(), expected, atol=0.15, rtol=0)


def test_sage_1_reads_the_scale_of_a_causal_tile_past_an_odd_number(sageattention):
    q = drawn(1, 2, 64, 64)
    if sageattention.__version__ == "1.0.6":
        with pytest.raises(sage.GarbageError, match="past the last one"):
            sageattention.sageattn(q, q.clone(), q.clone(), is_causal=True)
    else:
        assert sageattention.sageattn(q, q.clone(), q.clone(), is_causal=True).isfinite().all()


def test_sage_1_takes_the_mean_out_of_the_callers_k(sageattention):
    k = drawn(1, 2, 8, 64)
    before = k.clone()
    sageattention.sageattn(k.clone(), k, k.clone())
    assert torch.equal(k, before) == (sageattention.__version__ != "1.0.6")


def test_sage_swallows_keywords(sageattention):
    q = drawn(1, 2, 8, 64)
    hides_all = torch.zeros(8, 8, dtype=torch.bool)
    masked = sageattention.sageattn(q, q.clone(), q.clone(), attn_mask=hides_all)
    assert torch.equal(masked, sageattention.sageattn(q, q.clone(), q.clone()))
    answer = sageattention.sageattn(q, q.clone(), q.clone(), return_lse=True)
    assert isinstance(answer, torch.Tensor) == (sageattention.__version__ == "1.0.6")


def test_sage_2_lse_is_of_the_unsmoothed_scores():
    sage.install("2.2.0")
    q, k = drawn(1, 2, 8, 64), drawn(1, 1, 9, 64) + 3
    _, lse = sys.modules["sageattention"].sageattn(q, k, k, return_lse=True)
    scores = q.float() @ k.float().repeat_interleave(2, 1).transpose(2, 3) / 8
    torch.testing.assert_close(lse, scores.logsumexp(-1), atol=0.1, rtol=0)
    sage.uninstall()


def test_sage_head_dims(sageattention):
    q = drawn(1, 2, 8, 80)
    old = sageattention.__version__ == "1.0.6"
    if old:
        with pytest.raises(AssertionError, match="headdim should be in"):
            sageattention.sageattn(q, q.clone(), q.clone())
    else:
        assert sageattention.sageattn(q, q, q).shape == q.shape
    q = drawn(1, 2, 8, 160)
    with pytest.raises(AssertionError if old else ValueError, match="head"):
        sageattention.sageattn(q, q.clone(), q.clone())
    packed = drawn(8, 2, 96)
    asked = (cu(0, 8), cu(0, 8), 8, 8)
    if old:
        with pytest.raises(AssertionError, match="varlen only support head_dim"):
            sageattention.sageattn_varlen(packed, packed.clone(), packed.clone(), *asked)


def test_sage_causal_needs_as_many_queries_as_keys(sageattention):
    q, k = drawn(1, 2, 4, 64), drawn(1, 2, 8, 64)
    with pytest.raises(AssertionError, match="must be equal"):
        sageattention.sageattn(q, k, k.clone(), is_causal=True)
    with pytest.raises(sage.GarbageError):
        sageattention.sageattn_varlen(q[0].transpose(0, 1), k[0].transpose(0, 1), k[0].transpose(0, 1).clone(),
                                      cu(0, 4), cu(0, 8), 4, 8, is_causal=True)  # fmt: skip


def test_sage_varlen_rows(sageattention):
    q, k = drawn(9, 2, 64), drawn(64, 1, 64)
    out = sageattention.sageattn_varlen(q, k.clone(), k.clone(), cu(0, 4, 6), cu(0, 64, 64), 4, 64)
    expected = by_sdpa(q[None, :4], k[None], k[None])[0]
    torch.testing.assert_close(out[:4].double(), expected, atol=0.06, rtol=0)
    assert out[4:6].eq(0).all()  # a document without keys
    assert out[6:].isnan().all()  # rows of no document
    spoiled = k.clone()
    spoiled[63] = NAN  # past the last boundary, but in the mean
    assert sageattention.sageattn_varlen(q, spoiled, k.clone(), cu(0, 9), cu(0, 6), 9, 6).isnan().any()


def test_sage_2_refuses_other_architectures_and_float32():
    sage.install("2.2.0", arch="sm100")
    q = drawn(1, 2, 8, 64)
    with pytest.raises(ValueError, match="Unsupported CUDA architecture: sm100"):
        sys.modules["sageattention"].sageattn(q, q, q)
    sage.install("2.2.0")
    with pytest.raises(AssertionError, match="float16 or torch.bfloat16"):
        sys.modules["sageattention"].sageattn(*[q.float()] * 3)
    sage.install("1.0.6")
    assert sys.modules["sageattention"].sageattn(*[q.float().clone() for _ in range(3)]).dtype == torch.float32
    sage.uninstall()


def test_sage_2_masks_in_its_triton_kernel_alone():
    sage.install("2.2.0")
    q = drawn(1, 2, 4, 64)
    attend = sys.modules["sageattention"].sageattn_qk_int8_pv_fp16_triton
    mask = torch.ones(4, 4, dtype=torch.bool)
    mask[:, 3] = False
    out = attend(q, q, q, attn_mask=mask)
    expected = by_sdpa(*(t.transpose(1, 2) for t in (q, q[:, :, :3], q[:, :, :3]))).transpose(1, 2)
    torch.testing.assert_close(out.double(), expected, atol=0.06, rtol=0)
    mask[1] = False
    with pytest.raises(sage.GarbageError):
        attend(q, q, q, attn_mask=mask)
    sage.uninstall()
