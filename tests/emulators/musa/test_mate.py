"""What mate's functions must reproduce: FlashAttention 3's answers with its additions, and what they refuse."""

from __future__ import annotations

import inspect

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.musa import mate, mate_kernels
from tests.emulators.musa.stack import LintError, using

pytestmark = pytest.mark.emulated

INF = float("inf")


@pytest.fixture(autouse=True)
def on_musa(monkeypatch):
    """Every tensor passes for one of MUSA's, as once mate is installed."""
    monkeypatch.setattr(torch.Tensor, "is_musa", property(lambda tensor: True), raising=False)
    mate_kernels.counts.clear()


def drawn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cu(*bounds: int) -> torch.Tensor:
    return torch.tensor(bounds, dtype=torch.int32)


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, **asked):
    return mate.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k, **asked
    )


ASKED = pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window_size": (1, 2)}, {"softcap": 2.0}])


def words(asked):
    known = {"window_size": "window"}
    return {known.get(name, name): value for name, value in asked.items()}


@ASKED
@pytest.mark.parametrize(("dim", "v_dim"), [(64, 64), (40, 40), (192, 128), (512, 512)])
def test_dense_is_attention_from_the_bottom_right(asked, dim, v_dim):
    q, k, v = drawn(2, 5, 4, dim), drawn(2, 7, 2, dim), drawn(2, 7, 2, v_dim)
    out, lse = mate.flash_attn_func(q, k, v, return_softmax_lse=True, **asked)
    want, want_lse = reference_attention(q.double(), k.double(), v.double(), return_lse=True, **words(asked))
    close(out, want)
    close(lse, want_lse)
    assert lse.dtype == torch.float32


@ASKED
def test_documents_stay_apart_and_their_lse_is_of_heads_first(asked):
    q, k = drawn(5, 4, 64), drawn(7, 2, 64)
    out, lse = varlen(q, k, k, cu(0, 3, 5), cu(0, 4, 7), 3, 4, return_attn_probs=True, **asked)
    for rows, keys in ((slice(0, 3), slice(0, 4)), (slice(3, 5), slice(4, 7))):
        one = (t[None].double() for t in (q[rows], k[keys], k[keys]))
        want, want_lse = reference_attention(*one, return_lse=True, **words(asked))
        close(out[rows], want[0])
        close(lse[:, rows], want_lse[0])


def test_a_tensor_comes_back_unless_the_lse_is_asked():
    q = drawn(1, 4, 2, 64)
    assert isinstance(mate.flash_attn_func(q, q, q), torch.Tensor)
    assert len(mate.flash_attn_func(q, q, q, return_attn_probs=True)) == 2


def test_rows_without_a_key_are_zero_with_lse_minus_inf():
    q, k = drawn(1, 5, 2, 64), drawn(1, 2, 2, 64)
    out, lse = mate.flash_attn_func(q, k, k, causal=True, return_softmax_lse=True)
    assert out[:, :3].eq(0).all()
    assert lse[..., :3].eq(-INF).all()


def test_rows_of_no_document_and_past_the_stated_longest_are_not_written():
    q = drawn(6, 2, 64)
    out = varlen(q, q, q, cu(0, 4), cu(0, 6), 2, 6)
    assert out[:2].isfinite().all()
    assert out[2:].isnan().all()


@pytest.mark.parametrize("page", [1, 5, 16, 64])
@pytest.mark.parametrize("name", ["page_table", "block_table"])
def test_pages_of_any_size_by_used_rows(page, name):
    q, pool = drawn(2, 3, 2, 64), drawn(12, page, 2, 64)
    table = torch.tensor([[2, 0, 5, 1], [7, 3, 9, 4]], dtype=torch.int32)
    used = cu(min(3, 4 * page), 4 * page)
    out = mate.flash_attn_varlen_func(q, pool, pool, seqused_k=used, causal=True, **{name: table})
    for row in range(2):
        keys = pool[table[row].long()].flatten(0, 1)[: int(used[row])][None].double()
        close(out[row], reference_attention(q[row : row + 1].double(), keys, keys, causal=True)[0])


@pytest.mark.parametrize(
    ("said", "change"),
    [
        ("float16 or bfloat16", {"dtype": torch.float32}),
        ("same dtype", {"k_dtype": torch.float16}),
        ("int32", {"cu": torch.tensor([0, 4])}),
        ("Add config for headdim", {"dim": 64, "v_dim": 192}),
        ("divisible by num_head_kv", {"kv_heads": 3}),
        ("batch_size must equal", {"cu_k": cu(0, 2, 4)}),
        ("reads outside", {"cu": cu(0, 5)}),
        ("not ascending", {"cu": cu(0, 3, 1)}),
        ("no query rows", {"rows": 0, "cu": cu(0, 0)}),
    ],
)
def test_it_refuses(said, change):
    rows, dim, dtype = change.get("rows", 4), change.get("dim", 64), change.get("dtype", torch.bfloat16)
    heads = change.get("kv_heads", 2)
    q, k = drawn(rows, 2, dim, dtype=dtype), drawn(4, heads, dim, dtype=change.get("k_dtype", dtype))
    v = drawn(4, heads, change.get("v_dim", dim), dtype=change.get("k_dtype", dtype))
    bounds = change.get("cu", cu(0, rows))
    with pytest.raises((AssertionError, RuntimeError), match=said):
        varlen(q, k, v, bounds, change.get("cu_k", bounds), 4, 4)


def test_pages_go_with_used_rows_and_not_with_boundaries_of_keys():
    q, pool, table = drawn(4, 2, 64), drawn(2, 16, 2, 64), cu(0)[None]
    with pytest.raises(AssertionError, match="not supported with cu_seqlens_k"):
        varlen(q, pool, pool, cu(0, 4), cu(0, 4), 4, 4, page_table=table)
    with using(lint=True), pytest.raises(LintError, match="without seqused_k"):
        mate.flash_attn_varlen_func(q, pool, pool, cu(0, 4), max_seqlen_q=4, page_table=table)
    with pytest.raises(RuntimeError, match="outside the pool"):
        mate.flash_attn_varlen_func(q, pool, pool, cu(0, 4), max_seqlen_q=4, page_table=table + 2, seqused_k=cu(4))


def test_a_right_side_of_zero_without_causal_stumbles_over_its_own_choice_of_kernel():
    q = drawn(1, 4, 2, 64)
    with pytest.raises(AssertionError, match="window_size_right"):
        mate.flash_attn_func(q, q, q, window_size=(-1, 0))
    mate.flash_attn_func(q, q, q, causal=True)
    assert mate_kernels.counts["asm"] == 2 - 1
    wide = drawn(1, 4, 2, 256)
    close(
        mate.flash_attn_func(wide, wide, wide, window_size=(-1, 0)), mate.flash_attn_func(wide, wide, wide, causal=True)
    )
    assert mate_kernels.counts["mutlass"] == 2


def test_packed_queries_without_boundaries_of_keys_stumble():
    q = drawn(4, 2, 64)
    with pytest.raises(AttributeError, match="is_musa"):
        mate.flash_attn_varlen_func(q, q, q, cu(0, 4), max_seqlen_q=4)


def test_a_nan_behind_a_document_in_its_last_tile_spoils_it():
    q, v = drawn(4, 2, 64), drawn(4, 2, 64)
    v[2:] = float("nan")
    assert varlen(q, q, v, cu(0, 2, 4), cu(0, 2, 4), 2, 2)[:2].isnan().all()
    long, far = drawn(128, 2, 64), drawn(128, 2, 64)
    far[64:] = float("nan")
    assert varlen(long, long, far, cu(0, 64, 128), cu(0, 64, 128), 64, 64)[:64].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_it_hides_before_it_scales(scale):
    q = drawn(1, 4, 2, 64)
    assert mate.flash_attn_func(q, q, q, causal=True, softmax_scale=scale).isnan().any()


def test_gradients_are_of_packed_documents_alone():
    q, k = drawn(5, 4, 64).requires_grad_(), drawn(7, 2, 64).requires_grad_()
    out = varlen(q, k, k, cu(0, 5), cu(0, 7), 5, 7, causal=True)
    found = torch.autograd.grad(out.float().sum(), (q, k))
    exact = [t.detach()[None].double().requires_grad_() for t in (q, k)]
    want = reference_attention(exact[0], exact[1], exact[1], causal=True)
    for one, right in zip(found, torch.autograd.grad(want.sum(), exact), strict=True):
        torch.testing.assert_close(one.double(), right[0], atol=5e-2, rtol=0)
    batch = drawn(1, 4, 2, 64).requires_grad_()
    with pytest.raises(TypeError, match="not subscriptable"):
        torch.autograd.grad(mate.flash_attn_func(batch, batch, batch).sum(), batch)


def test_other_architectures_and_old_sdks_are_refused():
    q = drawn(1, 4, 2, 64)
    with using(card="S4000"), pytest.raises(RuntimeError, match="MP31"):
        mate.flash_attn_func(q, q, q)
    with using(sdk="4.2.0"), pytest.raises(ImportError, match=r"4\.3\.6"):
        mate.flash_attn_func(q, q, q)


def test_tensors_that_are_not_on_the_card_are_refused(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_musa", property(lambda tensor: tensor.dtype != torch.int32), raising=False)
    q = drawn(4, 2, 64)
    with pytest.raises(AssertionError, match="on MUSA device"):
        varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4)


def test_its_signature_is_fa3s_with_the_wrappers_additions():
    names = list(inspect.signature(mate.flash_attn_varlen_func).parameters)
    assert names[:9] == [
        "q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_q", "seqused_k",
    ]  # fmt: skip
    assert {"page_table", "block_table", "return_softmax_lse", "return_attn_probs", "sinks", "s_aux", "out"} <= set(
        names
    )
    assert inspect.signature(mate.flash_attn_func).parameters["num_splits"].default == 0
    assert "out" not in inspect.signature(mate.flash_attn_func).parameters
