"""flash_attn's extension over Composable Kernel: answers, refusals, and what it leaves behind or unwritten."""

from __future__ import annotations

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.rocm import flash_attn_2_cuda as extension
from tests.emulators.rocm.stack import LintError, using

INF = float("inf")
MI200_AND_LATER = ("gfx90a", "gfx942", "gfx950")


@pytest.fixture(autouse=True)
def bare():
    """What the vendor says nothing about is answered as the vendor does; tests of lint turn it on."""
    with using(lint=False):
        yield


def drawn(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def cu(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, causal=False, window=(-1, -1), softcap=0.0, **other):
    used, left, table = (other.get(name) for name in ("seqused_k", "leftpad_k", "block_table"))
    out, lse, _, _ = extension.varlen_fwd(
        q, k, v, None, cu_q, cu_k, used, left, table, None, max_q, max_k, 0.0, 0.125, False, causal, *window, softcap,
        False, None,
    )  # fmt: skip
    return out, lse


def dense(q, k, v, *, causal=False, window=(-1, -1), softcap=0.0):
    out, lse, _, _ = extension.fwd(q, k, v, None, None, 0.0, 0.125, causal, *window, softcap, False, None)
    return out, lse


def kvcache(q, k, v, used=None, *, table=None, left=None, softcap=0.0):
    return extension.fwd_kvcache(
        q, k, v, None, None, used, None, None, None, left, table, None, None, 0.125, True, -1, -1, softcap, True, 0
    )


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (1, 2)}, {"causal": True, "window": (2, -1)}])
def test_attention_per_document_aligned_bottom_right(asked):
    q, k, v = drawn(5, 4, 64), drawn(7, 2, 64), drawn(7, 2, 64)
    out, lse = varlen(q, k, v, cu(0, 3, 5), cu(0, 4, 7), 3, 4, **asked)
    right = {**asked, "window": (2, None)} if asked.get("window") == (2, -1) else asked
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 7))):
        one = (t[None].double() for t in (q[rows], k[keys], v[keys]))
        want, want_lse = reference_attention(*one, return_lse=True, **right)
        close(out[rows], want[0])
        close(lse[:, rows], want_lse[0])


def test_rows_that_see_nothing_are_zero_with_lse_minus_inf_where_cuda_has_plus_inf():
    q, k = drawn(6, 2, 64), drawn(3, 2, 64)
    out, lse = varlen(q, k, k, cu(0, 2, 5), cu(0, 0, 3), 3, 3)
    assert out[:2].eq(0).all()
    assert lse[:, :2].eq(-INF).all()
    out, lse = dense(drawn(1, 4, 2, 64), drawn(1, 2, 2, 64), drawn(1, 2, 2, 64), causal=True)
    assert out[0, :2].eq(0).all()
    assert lse[0, :, :2].eq(-INF).all()


def test_no_key_at_all_is_zero_with_lse_plus_inf():
    out, lse = varlen(drawn(6, 2, 64), drawn(0, 2, 64), drawn(0, 2, 64), cu(0, 6), cu(0, 0), 6, 0)
    assert out.eq(0).all()
    assert lse.eq(INF).all()
    out, lse = dense(drawn(2, 3, 2, 64), drawn(2, 0, 2, 64), drawn(2, 0, 2, 64))
    assert out.eq(0).all()
    assert lse.eq(INF).all()


def test_rows_of_no_document_and_beyond_an_understated_longest_are_unwritten():
    q = drawn(6, 2, 64)
    out, lse = varlen(q, q, q, cu(0, 5), cu(0, 5), 3, 5)
    assert out[:3].isfinite().all()
    assert out[3:].isnan().all()
    assert lse[:, 3:].isnan().all()


@pytest.mark.parametrize("call", [dense, varlen])
def test_softcap_is_not_read(call):
    q = drawn(1, 4, 2, 64)
    args = (q, q, q) if call is dense else (q[0], q[0], q[0], cu(0, 4), cu(0, 4), 4, 4)
    assert call(*args, softcap=0.5)[0].equal(call(*args)[0])
    with using(lint=True), pytest.raises(LintError, match="softcap"):
        call(*args, softcap=0.5)


@pytest.mark.parametrize("name", ["seqused_k", "leftpad_k"])
def test_used_lengths_and_left_padding_are_not_read(name):
    q = drawn(4, 2, 64)
    args = (q, q, q, cu(0, 4), cu(0, 4), 4, 4)
    assert varlen(*args, **{name: cu(2)})[0].equal(varlen(*args)[0])
    with using(lint=True), pytest.raises(LintError, match=name):
        varlen(*args, **{name: cu(2)})


def test_pages_are_of_128_rows_and_a_wrong_page_faults():
    q, pool = drawn(2, 2, 64), drawn(3, 128, 2, 64)
    table = cu(2, 0)[None]
    out, _ = varlen(q, pool, pool, cu(0, 2), cu(0, 140), 2, 256, block_table=table)
    keys = torch.cat([pool[2], pool[0, :12]])
    close(out, reference_attention(q[None].double(), keys[None].double(), keys[None].double())[0])
    with pytest.raises(RuntimeError, match="outside the pool"):
        varlen(q, pool, pool, cu(0, 2), cu(0, 140), 2, 256, block_table=table + 1)
    small = pool[:, :64].contiguous()
    with pytest.raises(RuntimeError, match="divisible by 128"):
        varlen(q, small, small, cu(0, 2), cu(0, 100), 2, 128, block_table=table)


def test_a_cache_without_lengths_counts_as_empty():
    q, cache = drawn(2, 1, 2, 64), drawn(2, 6, 2, 64)
    out, lse = kvcache(q, cache, cache)
    assert out.eq(0).all()
    assert lse.eq(-INF).all()
    with using(lint=True), pytest.raises(LintError, match="cache_seqlens"):
        kvcache(q, cache, cache)


def test_a_cache_reads_the_used_rows_of_each_slot_and_takes_any_head_dim():
    q, cache = drawn(2, 1, 2, 20), drawn(2, 6, 2, 20)
    out, lse = kvcache(q, cache, cache, cu(4, 0))
    close(out[0], reference_attention(q[:1].double(), cache[:1, :4].double(), cache[:1, :4].double(), scale=0.125)[0])
    assert out.shape == q.shape
    assert lse[1].eq(-INF).all()
    with using(lint=True), pytest.raises(LintError, match="leftpad"):
        kvcache(q, cache, cache, cu(4, 0), left=cu(1, 0))


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("fp16 and bf16", {"dtype": torch.float32}),
        ("at most 256", {"dim": 264}),
        ("multiple of 8", {"dim": 60}),
        ("int32", {"cu_q": torch.tensor([0, 4])}),
        ("reads outside", {"cu_q": cu(0, 5)}),
        ("batch size", {"cu_q": cu(0)}),
        ("no query", {"rows": 0, "cu_q": cu(0, 0)}),
        ("divide", {"kv_heads": 4}),
    ],
)
def test_refuses(words, change):
    rows, dim, dtype = change.get("rows", 4), change.get("dim", 64), change.get("dtype", torch.bfloat16)
    q, k = drawn(rows, 6, dim, dtype=dtype), drawn(rows, change.get("kv_heads", 2), dim, dtype=dtype)
    with pytest.raises(RuntimeError, match=words):
        varlen(q, k, k, change.get("cu_q", cu(0, rows)), cu(0, rows), 4, 4)


def test_dense_refuses_an_empty_batch_and_no_queries():
    for shape, words in (((0, 4, 2, 64), "batch size must be positive"), ((1, 0, 2, 64), "empty grid")):
        q = drawn(*shape)
        with pytest.raises(RuntimeError, match=words):
            dense(q, q, q)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx942", "gfx950", "gfx1100"])
def test_it_is_built_for_data_centre_chips(arch):
    q = drawn(1, 4, 2, 64)
    with using(arch=arch):
        if arch in MI200_AND_LATER:
            assert dense(q, q, q)[0].isfinite().all()
        else:
            with pytest.raises(RuntimeError, match="no kernel image for gfx1100"):
                dense(q, q, q)


def test_hides_before_it_scales():
    q = drawn(1, 4, 2, 64)
    assert extension.fwd(q, q, q, None, None, 0.0, 0.0, True, -1, -1, 0.0, False, None)[0].isnan().any()


def test_keys_of_a_document_without_queries_get_no_gradient():
    """Dao-AILab/flash-attention PR 2421: NaN in dk and dv where a document has no query."""
    q, k = drawn(2, 2, 64), drawn(5, 2, 64)
    dq, dk, dv, _ = extension.varlen_bwd(
        q, q, k, k, None, None, None, None, None, cu(0, 0, 2), cu(0, 3, 5), None, 2, 3, 0.0, 0.125, False, False, -1,
        -1, 0.0, True, None, None,
    )  # fmt: skip
    assert dq.isfinite().all()
    assert dk[:3].isnan().all()
    assert dv[:3].isnan().all()
    assert dk[3:].isfinite().all()


@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (1, 2)}])
def test_gradients(asked):
    q, k, v, dout = drawn(1, 5, 4, 64), drawn(1, 7, 2, 64), drawn(1, 7, 2, 64), drawn(1, 5, 4, 64)
    causal, window = asked.get("causal", False), asked.get("window", (-1, -1))
    got = extension.bwd(
        dout, q, k, v, None, None, None, None, None, None, 0.0, 0.125, causal, *window, 0.0, True, None, None
    )
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    want = torch.autograd.grad(reference_attention(*exact, **asked), exact, dout.double())
    for one, right in zip(got[:3], want, strict=True):
        close(one, right)


def test_gradients_by_atomics_differ_from_run_to_run():
    q, dout = drawn(1, 64, 4, 64, dtype=torch.float16), drawn(1, 64, 4, 64, dtype=torch.float16)

    def dq(deterministic):
        asked = (None, None, None, None, None, None, 0.0, 0.125, False, -1, -1, 0.0, deterministic, None, None)
        return extension.bwd(dout, q, q, q, *asked)[0]

    assert dq(True).equal(dq(True))
    assert not all(dq(False).equal(dq(False)) for _ in range(8))


def test_inputs_stay_as_they_are():
    q, k = drawn(4, 2, 64), drawn(6, 2, 64)
    kept = [t.clone() for t in (q, k)]
    varlen(q, k, k, cu(0, 4), cu(0, 6), 4, 6, causal=True)
    assert all(t.equal(one) for t, one in zip((q, k), kept, strict=True))
