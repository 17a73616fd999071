"""What the stand-ins for FA2, FA4, torch's flash op and cuDNN must reproduce: answers, refusals and known faults."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.cuda import aten_cudnn, aten_flash, fa4
from tests.emulators.cuda import flash_attn_2_cuda as fa2

INF = float("inf")


@pytest.fixture
def cute():
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "flash_attn"}
    fa4.install()
    yield importlib.import_module("flash_attn.cute")
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        del sys.modules[name]
    sys.modules.update(kept)


def drawn(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def cu(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=0.125, causal=False, window=(-1, -1), softcap=0.0, **pages):
    """FA2's raw varlen forward: out, lse."""
    used, table = pages.get("seqused_k"), pages.get("block_table")
    out, lse, _, _ = fa2.varlen_fwd(
        q, k, v, None, cu_q, cu_k, used, None, table, None, max_q, max_k, 0.0, scale, False, causal, *window,
        softcap, False, None,
    )  # fmt: skip
    return out, lse


def aten_varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, scale=0.125, causal=False, window=(-1, -1), **pages):
    """torch's flash forward, called below the dispatcher, so that nothing is registered in this process."""
    out, lse, *_ = aten_flash.forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale, window_size_left=window[0],
        window_size_right=window[1], **pages,
    )  # fmt: skip
    return out, lse


FLASH_2 = pytest.mark.parametrize("call", [varlen, aten_varlen])


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


@FLASH_2
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (1, 2)}])
def test_flash_2_is_attention_per_document_aligned_bottom_right(call, asked):
    q, k, v = drawn(5, 4, 64), drawn(7, 2, 64), drawn(7, 2, 64)
    out, lse = call(q, k, v, cu(0, 3, 5), cu(0, 4, 7), 3, 4, **asked)
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 7))):
        one = (t[None].double() for t in (q[rows], k[keys], v[keys]))
        want, want_lse = reference_attention(*one, return_lse=True, **asked)
        close(out[rows], want[0])
        close(lse[:, rows], want_lse[0])


@FLASH_2
def test_flash_2_empty_rows_are_zero_with_lse_plus_inf_and_uncovered_rows_are_unwritten(call):
    q, k = drawn(6, 2, 64), drawn(3, 2, 64)
    out, lse = call(q, k, k, cu(0, 2, 5), cu(0, 0, 3), 3, 3)
    assert out[:2].eq(0).all()
    assert lse[:, :2].eq(INF).all()
    assert out[5].isnan().all()
    assert lse[:, 5].isnan().all()
    out, lse = call(q, k, k, cu(0, 6), cu(0, 0), 6, 0)
    assert out.eq(0).all()
    assert lse.eq(INF).all()


@FLASH_2
def test_flash_2_rows_beyond_an_understated_longest_document_are_unwritten(call):
    q = drawn(4, 2, 64)
    out, _ = call(q, q, q, cu(0, 4), cu(0, 4), 2, 4)
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()


@FLASH_2
@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("fp16 and bf16", {"dtype": torch.float32}),
        ("at most 256", {"dim": 264}),
        ("multiple of 8", {"dim": 60}),
        ("int32", {"cu_q": torch.tensor([0, 4])}),
        ("reads outside", {"cu_q": cu(0, 5)}),
        ("batch size", {"cu_q": cu(0)}),
        ("total_q", {"rows": 0, "cu_q": cu(0, 0)}),
    ],
)
def test_flash_2_refuses(call, words, change):
    rows = change.get("rows", 4)
    q = drawn(rows, 2, change.get("dim", 64), dtype=change.get("dtype", torch.bfloat16))
    with pytest.raises(RuntimeError, match=words):
        call(q, q, q, change.get("cu_q", cu(0, rows)), cu(0, rows), 4, 4)


@FLASH_2
def test_flash_2_pages_are_of_256_rows_and_a_wrong_page_faults(call):
    q, pool = drawn(2, 2, 64), drawn(3, 256, 2, 64)
    table, used = torch.tensor([[2, 0]], dtype=torch.int32), cu(260)
    out, _ = call(q, pool, pool, cu(0, 2), cu(0, 260), 2, 512, block_table=table, seqused_k=used)
    keys = torch.cat([pool[2], pool[0, :4]])
    close(out, reference_attention(q[None].double(), keys[None].double(), keys[None].double())[0])
    with pytest.raises(RuntimeError, match="outside the pool"):
        call(q, pool, pool, cu(0, 2), cu(0, 260), 2, 512, block_table=table + 1, seqused_k=used)
    small = pool[:, :128].contiguous()
    with pytest.raises(RuntimeError, match="divisible by 256"):
        call(q, small, small, cu(0, 2), cu(0, 200), 2, 256, block_table=table, seqused_k=cu(200))


@FLASH_2
def test_flash_2_hides_before_it_scales(call):
    q = drawn(4, 2, 64)
    assert call(q, q, q, cu(0, 4), cu(0, 4), 4, 4, scale=0.0, causal=True)[0].isnan().any()


def test_fa2_one_query_a_document_with_grouped_heads_wants_every_document_to_have_it():
    q, k = drawn(1, 4, 64), drawn(4, 2, 64)
    with pytest.raises(RuntimeError, match="reshape"):
        varlen(q, k, k, cu(0, 1, 1), cu(0, 2, 4), 1, 2)


def test_fa2_kvcache_reads_the_used_rows_of_each_slot():
    q, cache = drawn(2, 1, 2, 64), drawn(2, 6, 2, 64)
    out, lse = fa2.fwd_kvcache(
        q, cache, cache, None, None, cu(4, 0), None, None, None, None, None, None, None, 0.125, True, -1, -1, 0.0,
        True, 0,
    )  # fmt: skip
    close(out[0], reference_attention(q[:1].double(), cache[:1, :4].double(), cache[:1, :4].double())[0])
    assert out[1].eq(0).all()
    assert lse[1].eq(INF).all()


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"softcap": 1.5}, {"window": (1, 2)}])
def test_fa2_gradients(asked):
    q, k, v, dout = drawn(1, 5, 4, 64), drawn(1, 7, 2, 64), drawn(1, 7, 2, 64), drawn(1, 5, 4, 64)
    options = {"causal": False, "window": (-1, -1), "softcap": 0.0, **asked}
    got = fa2.bwd(
        dout, q, k, v, None, None, None, None, None, None, 0.0, 0.125, options["causal"], *options["window"],
        options["softcap"], False, None, None,
    )  # fmt: skip
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(reference_attention(*exact, **asked), exact, dout.double())
    for one, right in zip(got[:3], want, strict=True):
        close(one, right)


def test_fa4_always_returns_two_and_its_empty_rows_have_lse_minus_inf(cute):
    q, k = drawn(1, 4, 2, 64), drawn(1, 2, 2, 64)
    assert cute.flash_attn_func(q, k, k)[1] is None
    out, lse = cute.flash_attn_func(q, k, k, causal=True, return_lse=True)
    assert out[0, :2].eq(0).all()
    assert lse[0, :, :2].eq(-INF).all()
    close(out, reference_attention(q.double(), k.double(), k.double(), causal=True))


def test_fa4_fourth_position_is_qv(cute):
    q = drawn(1, 4, 2, 64)
    with pytest.raises(NotImplementedError, match="qv"):
        cute.flash_attn_func(q, q, q, 0.5)


def test_fa4_reads_a_single_negative_window_side_as_a_bound(cute):
    q = drawn(1, 4, 2, 64)
    close(cute.flash_attn_func(q, q, q, window_size=(-1, -1))[0], cute.flash_attn_func(q, q, q)[0])
    with pytest.raises(ValueError, match="single negative side"):
        cute.flash_attn_func(q, q, q, window_size=(-1, 0))


def test_fa4_a_nan_behind_a_document_in_its_last_tile_spoils_it(cute):
    q, v = drawn(4, 2, 64), drawn(4, 2, 64)
    v[2:] = float("nan")
    out, _ = cute.flash_attn_varlen_func(
        q, q, v, cu_seqlens_q=cu(0, 2), cu_seqlens_k=cu(0, 2), max_seqlen_q=2, max_seqlen_k=2
    )
    assert out.isnan().all()


def test_fa4_pages_of_any_size_by_used_rows(cute):
    q, pool = drawn(1, 2, 2, 64), drawn(3, 16, 2, 64)
    table = torch.tensor([[2, 0]], dtype=torch.int32)
    asked = {"page_table": table, "seqused_k": cu(20), "causal": True}
    out, _ = cute.flash_attn_varlen_func(q, pool, pool, **asked)
    keys = torch.cat([pool[2], pool[0, :4]])[None].double()
    close(out, reference_attention(q.double(), keys, keys, causal=True))
    with pytest.raises(AssertionError, match="cu_seqlens_k"):
        cute.flash_attn_varlen_func(q, pool, pool, cu_seqlens_k=cu(0, 20), **asked)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_fa4_takes_half_precision_only(cute, dtype):
    q = drawn(1, 4, 2, 64).to(dtype)
    with pytest.raises(AssertionError):
        cute.flash_attn_func(q, q, q)


def test_fa4_gradients_through_output_and_lse(cute):
    q, k = drawn(1, 5, 4, 64).requires_grad_(), drawn(1, 7, 2, 64).requires_grad_()
    out, lse = cute.flash_attn_func(q, k, k, causal=True, return_lse=True)
    found = torch.autograd.grad(out.float().sum() + lse.sum(), (q, k))
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    want, want_lse = reference_attention(exact[0], exact[1], exact[1], causal=True, return_lse=True)
    for one, right in zip(found, torch.autograd.grad(want.sum() + want_lse.sum(), exact), strict=True):
        close(one, right)


def cudnn(q, k, v, mask=None, *, causal=False, lse=True):
    return aten_cudnn.forward(*(t.transpose(1, 2) for t in (q, k, v)), mask, lse, 0.0, causal, scale=0.125)


def test_cudnn_is_causal_from_the_top_left_and_its_lse_has_a_last_axis():
    q, k = drawn(1, 3, 2, 64), drawn(1, 5, 2, 64)
    out, lse, *_ = cudnn(q, k, k, causal=True)
    square = reference_attention(q.double(), k[:, :3].double(), k[:, :3].double(), causal=True)
    close(out.transpose(1, 2), square)
    assert lse.shape == (1, 2, 3, 1)
    assert cudnn(q, k, k, lse=False)[1].numel() == 0


def test_cudnn_rows_hidden_by_inf_are_zero_and_those_hidden_by_bool_are_garbage():
    q, k = drawn(1, 3, 2, 64), drawn(1, 5, 2, 64)
    seen = torch.ones(1, 1, 3, 5, dtype=torch.bool)
    seen[..., 1, :] = False
    additive = torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, -INF)
    assert cudnn(q, k, k, additive)[0][0, :, 1].eq(0).all()
    garbage = cudnn(q, k, k, seen)[0][0, :, 1]
    assert garbage.isfinite().all()
    assert garbage.ne(0).all()


@pytest.mark.parametrize("change", ["one_key", "dim_60", "dim_136", "float32", "mask_of_another_dtype"])
def test_cudnn_refuses(change):
    dim = {"dim_60": 60, "dim_136": 136}.get(change, 64)
    q = drawn(1, 3, 2, dim, dtype=torch.float32 if change == "float32" else torch.bfloat16)
    keys = q[:, :1] if change == "one_key" else q
    mask = torch.zeros(1, 1, 3, 3) if change == "mask_of_another_dtype" else None
    with pytest.raises(RuntimeError, match="cuDNN attention"):
        cudnn(q, keys, keys, mask)


def test_cudnn_gradients_are_nan_with_a_mask_where_the_length_is_64_past_a_multiple_of_128():
    q = drawn(1, 64, 2, 8)
    heads_first = [q.transpose(1, 2)] * 3
    out, lse, *rest = cudnn(q, q, q)
    none = torch.empty(0)
    tail = (none, none, 64, 64, 0.0, False)
    plain = aten_cudnn.backward(out, *heads_first, out, lse, rest[4], rest[5], None, *tail, scale=0.125)
    mask = torch.zeros(1, 1, 64, 64, dtype=q.dtype)
    masked = aten_cudnn.backward(out, *heads_first, out, lse, rest[4], rest[5], mask, *tail, scale=0.125)
    assert all(grad.isfinite().all() for grad in plain)
    assert all(grad.isnan().all() for grad in masked)
