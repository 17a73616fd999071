"""What `_vllm_fa2_C::varlen_fwd` answers, writes and leaves unwritten, below the package that calls it."""

from __future__ import annotations

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.xpu import vllm_fa2
from tests.emulators.xpu.releases import DEVICES
from tests.emulators.xpu.stack import using

pytestmark = pytest.mark.emulated

INF = float("inf")
FAMILIES = pytest.mark.parametrize("device", ["BMG-G21", "PTL"])


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cu(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, **asked):
    """The op by keywords: out, lse."""
    known = {
        "seqused_k": None, "block_table": None, "alibi_slopes": None, "p_dropout": 0.0, "k_scale": None,
        "v_scale": None, "softmax_scale": 0.125, "softmax_sink": None, "is_causal": False, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "return_softmax": False, "mix_batch": True, "out": None,
    } | asked  # fmt: skip
    return vllm_fa2.varlen_fwd(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, leftpad_k=None, max_seqlen_q=max_q, max_seqlen_k=max_k,
        q_scale=None, zero_tensors=False, gen=None, num_splits=None, splits_per_seq=None, work_list=None, **known,
    )  # fmt: skip


def over_pages(q, pool, table, used, cu_q, max_q, **asked):
    rows = torch.tensor(table, dtype=torch.int32)
    return varlen(
        q, pool, pool, cu_q, torch.zeros_like(cu_q), max_q, max(used), seqused_k=cu(*used), block_table=rows, **asked
    )


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


@FAMILIES
@pytest.mark.parametrize("asked", [{}, {"is_causal": True}])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_each_document_is_attended_apart_and_causal_is_from_the_bottom_right(device, asked, dim):
    q, k, v = drawn(5, 4, dim), drawn(7, 2, dim), drawn(7, 2, dim)
    with using(device=device):
        out, _ = varlen(q, k, v, cu(0, 3, 5), cu(0, 4, 7), 3, 4, **asked)
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 7))):
        one = (t[None].double() for t in (q[rows], k[keys], v[keys]))
        close(out[rows], reference_attention(*one, causal=asked.get("is_causal", False), scale=0.125)[0])


@pytest.mark.parametrize("dim", [128, 192, 256])
def test_lse_is_of_heads_first_natural_and_float32(dim):
    q, k = drawn(5, 4, dim), drawn(7, 2, dim)
    _, lse = varlen(q, k, k, cu(0, 5), cu(0, 7), 5, 7, return_softmax=True)
    want = reference_attention(q[None].double(), k[None].double(), k[None].double(), scale=0.125, return_lse=True)[1][0]
    assert lse.shape == (4, 5)
    assert lse.dtype == torch.float32
    close(lse, want)


def test_rows_without_a_key_are_nan_with_lse_minus_inf():
    q, k = drawn(5, 2, 128), drawn(2, 2, 128)
    out, lse = varlen(q, k, k, cu(0, 5), cu(0, 2), 5, 2, is_causal=True, return_softmax=True)
    assert out[:3].isnan().all()
    assert lse[:, :3].eq(-INF).all()
    assert out[3:].isfinite().all()
    out, lse = varlen(q, k[:0], k[:0], cu(0, 5), cu(0, 0), 5, 0, return_softmax=True)
    assert out.isnan().all()
    assert lse.eq(-INF).all()


def test_rows_of_no_document_and_rows_past_the_stated_longest_are_not_written():
    q = drawn(6, 2, 64)
    out, _ = varlen(q, q, q, cu(0, 2, 4), cu(0, 3, 6), 2, 3)
    assert out[:4].isfinite().all()
    assert out[4:].isnan().all()
    kept = torch.full_like(q, 7.0)
    varlen(q, q, q, cu(0, 2, 4), cu(0, 3, 6), 2, 3, out=kept)
    assert kept[4:].eq(7.0).all()
    out, _ = varlen(q, q, q, cu(0, 6), cu(0, 6), 4, 6)
    assert out[4:].isnan().all()


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("only supports fp16, bf16", {"dtype": torch.float32}),
        ("not 16-byte aligned", {"dim": 60}),
        ("ragged format", {"rank": 4}),
        ("dtype torch.int32", {"cu": torch.tensor([0, 4])}),
        ("at most 512", {"dim": 520}),
        ("reads outside", {"cu": cu(0, 5)}),
        ("not ascending", {"cu": cu(0, 3, 1)}),
        ("no document", {"cu": cu(0)}),
        ("no query rows", {"rows": 0, "cu": cu(0, 0)}),
        ("not compiled", {"dim": 192}),
        ("head dim of K", {"v_dim": 128}),
        ("KV heads do not divide", {"kv_heads": 3}),
    ],
)
def test_it_refuses(words, change):
    rows, dim, dtype = change.get("rows", 4), change.get("dim", 64), change.get("dtype", torch.bfloat16)
    q, k = drawn(rows, 2, dim, dtype=dtype), drawn(4, change.get("kv_heads", 2), dim, dtype=dtype)
    v = drawn(4, change.get("kv_heads", 2), change.get("v_dim", dim), dtype=dtype)
    bounds = change.get("cu", cu(0, rows))
    with pytest.raises(RuntimeError, match=words):
        varlen(q[None] if change.get("rank") else q, k, v, bounds, bounds, 4, 4)


def test_mixed_dtypes_are_refused():
    q = drawn(4, 2, 64)
    with pytest.raises(RuntimeError, match="query and key must have the same dtype"):
        varlen(q, q.half(), q.half(), cu(0, 4), cu(0, 4), 4, 4)
    with pytest.raises(RuntimeError, match="key and value must have the same dtype"):
        varlen(q, q, q.half(), cu(0, 4), cu(0, 4), 4, 4)


@pytest.mark.parametrize("device", [name for name, (family, _) in DEVICES.items() if not family])
def test_devices_without_kernels_are_refused_in_words_that_cause_no_fallback(device):
    q = drawn(4, 2, 64)
    with using(device=device), pytest.raises(RuntimeError, match="Only XE2/XE3") as refused:
        varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4)
    assert "not compiled" not in str(refused.value)


@pytest.mark.parametrize("asked", [{"window_size_left": 2}, {"softmax_sink": torch.zeros(2)}])
def test_lse_beside_a_window_or_sinks_is_refused_in_words_that_cause_no_fallback(asked):
    q = drawn(4, 2, 128)
    with pytest.raises(RuntimeError, match="softmax_lse output is only supported") as refused:
        varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4, return_softmax=True, **asked)
    assert "not compiled" not in str(refused.value)


@pytest.mark.parametrize(
    ("device", "page", "taken"),
    [("BMG-G21", 16, True), ("BMG-G21", 48, True), ("BMG-G21", 8, False), ("PTL", 32, True), ("PTL", 48, False),
     ("PTL", 64, True), ("PTL", 128, True)],
)  # fmt: skip
def test_page_sizes(device, page, taken):
    q, pool = drawn(3, 4, 128), drawn(3, page, 2, 128)
    used = page + 2
    with using(device=device):
        if not taken:
            with pytest.raises(RuntimeError, match=str(page)):
                over_pages(q, pool, [[2, 0]], [used], cu(0, 3), 3)
            return
        out, _ = over_pages(q, pool, [[2, 0]], [used], cu(0, 3), 3, is_causal=True)
    keys = torch.cat([pool[2], pool[0]])[None, :used].double()
    close(out, reference_attention(q[None].double(), keys, keys, causal=True, scale=0.125)[0])


def test_lse_over_pages_depends_on_the_family():
    q, pool = drawn(3, 4, 128), drawn(3, 64, 2, 128)
    _, lse = over_pages(q, pool, [[1]], [5], cu(0, 3), 3, is_causal=True, return_softmax=True)
    assert lse.isfinite().all()
    with using(device="PTL"), pytest.raises(RuntimeError, match="softmax_lse output is only supported"):
        over_pages(q, pool, [[1]], [5], cu(0, 3), 3, is_causal=True, return_softmax=True)
    with using(device="PTL"):
        assert over_pages(q[:1], pool, [[1]], [5], cu(0, 1), 1, return_softmax=True)[1].isfinite().all()


def test_a_page_outside_the_pool_and_lengths_of_another_dtype_are_faults():
    q, pool = drawn(1, 2, 128), drawn(3, 64, 2, 128)
    with pytest.raises(RuntimeError, match="outside the pool"):
        over_pages(q, pool, [[3]], [5], cu(0, 1), 1)
    with pytest.raises(RuntimeError, match="read as int32"):
        varlen(q, pool, pool, cu(0, 1), cu(0, 0), 1, 5, seqused_k=torch.tensor([5]), block_table=cu(0)[None])
    with pytest.raises(RuntimeError, match="page_table must have dtype"):
        varlen(q, pool, pool, cu(0, 1), cu(0, 0), 1, 5, seqused_k=cu(5), block_table=torch.tensor([[0]]))


@pytest.mark.parametrize("max_q", [1, 2])
def test_a_nan_behind_the_used_rows_of_the_last_tile_spoils_the_document(max_q):
    q, pool = drawn(max_q, 2, 128), drawn(2, 64, 2, 128)
    pool[0, 5] = float("nan")
    assert over_pages(q, pool, [[0]], [5], cu(0, max_q), max_q, is_causal=True)[0].isnan().all()
    pool[0, 5] = 0.0
    pool[0, 63 if max_q > 1 else 0] = 0.0
    assert over_pages(q, pool, [[0]], [5], cu(0, max_q), max_q, is_causal=True)[0].isfinite().all()


def test_a_nan_of_the_next_document_does_not_reach_this_one():
    q, v = drawn(4, 2, 64), drawn(4, 2, 64)
    v[2:] = float("nan")
    assert varlen(q, q, v, cu(0, 2), cu(0, 2), 2, 2)[0][:2].isfinite().all()


def test_over_pages_a_document_without_queries_writes_a_row_of_its_neighbour():
    q, pool = drawn(3, 2, 128), drawn(2, 64, 2, 128)
    out, _ = over_pages(q, pool, [[0], [1]], [5, 6], cu(0, 0, 3), 3)
    assert out[0].isnan().all()
    assert out[1:].isfinite().all()
    with pytest.raises(RuntimeError, match="behind the output"):
        over_pages(q, pool, [[0], [1]], [5, 6], cu(0, 3, 3), 3)


def test_a_windows_unbounded_right_side_is_the_stated_longest_document():
    q, pool = drawn(40, 2, 128), drawn(1, 64, 2, 128)
    out, _ = over_pages(q, pool, [[0]], [8], cu(0, 40), 40, window_size_left=2)
    assert out[0].isnan().all()  # position -32 and 8 keys to its right: none, though every key is in the window
    right = varlen(q, pool, pool, cu(0, 40), cu(0, 0), 40, 40, seqused_k=cu(8), block_table=cu(0)[None],
                   window_size_left=2)[0]  # fmt: skip
    assert right[0].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_it_hides_before_it_scales(scale):
    q = drawn(4, 2, 64)
    assert varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4, is_causal=True, softmax_scale=scale)[0].isnan().any()


def test_keys_of_float8_have_one_scale_each():
    q, pool = drawn(2, 2, 128), drawn(1, 64, 2, 128).to(torch.float8_e4m3fn)
    two = torch.tensor(2.0)
    out, _ = over_pages(q, pool, [[0]], [5], cu(0, 2), 2, k_scale=two, v_scale=two)
    keys = pool[0, :5].double()[None] * 2
    close(out, reference_attention(q[None].double(), keys, keys, scale=0.125)[0])
    with pytest.raises(RuntimeError, match="requires both k_scale and v_scale"):
        over_pages(q, pool, [[0]], [5], cu(0, 2), 2, k_scale=two)
    with pytest.raises(RuntimeError, match="single element"):
        over_pages(q, pool, [[0]], [5], cu(0, 2), 2, k_scale=torch.ones(2), v_scale=two)


def test_inputs_are_not_modified():
    q, k = drawn(4, 2, 64), drawn(4, 2, 64)
    before = [t.clone() for t in (q, k)]
    varlen(q, k, k, cu(0, 4), cu(0, 4), 4, 4, is_causal=True)
    assert all(torch.equal(a, b) for a, b in zip(before, (q, k), strict=True))
