"""aiter: its two signatures, the kernels that it sends calls to, refusals, and each public failure by name."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.rocm import aiter_main, aiter_module, aiter_wheel, stack
from tests.emulators.rocm.aiter_routes import Asked, MemoryFault, hand_written
from tests.emulators.rocm.stack import LintError, using

INF = float("inf")
WHEEL, MAIN = "0.1.7.post2.dev18", "main-2026-08"
BUILDS = pytest.mark.parametrize("build", [WHEEL, MAIN])


@pytest.fixture(autouse=True)
def bare():
    with using(lint=False):
        yield


def drawn(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def cu(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


def exact(q, k, v, **asked):
    return reference_attention(*(t.double() for t in (q, k, v)), **asked)


def packed(q, k, v, *, module=aiter_wheel, lengths=None, **asked):
    """One document, or the given lengths of queries and keys."""
    of_q, of_k = lengths or ([q.shape[0]], [k.shape[0]])
    bounds = [torch.tensor([0, *torch.tensor(of).cumsum(0)], dtype=torch.int32) for of in (of_q, of_k)]
    return module.flash_attn_varlen_func(q, k, v, *bounds, max(of_q), max(of_k), **asked)


def test_its_functions_are_where_callers_import_them():
    kept = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "aiter"}
    aiter_module.install()
    import aiter
    from aiter.ops.mha import flash_attn_func

    assert aiter.flash_attn_func is flash_attn_func
    assert aiter.dtypes.fp8 == torch.float8_e4m3fnuz
    for name in [name for name in sys.modules if name.partition(".")[0] == "aiter"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_the_signatures_differ_from_flash_attention_and_by_build():
    def names(function):
        return list(inspect.signature(function).parameters)

    assert names(aiter_wheel.flash_attn_varlen_func)[7:9] == ["min_seqlen_q", "dropout_p"]
    assert "softcap" not in names(aiter_wheel.flash_attn_varlen_func)
    assert "logits_soft_cap" not in names(aiter_wheel.flash_attn_func)
    assert names(aiter_main.flash_attn_func)[-2:] == ["sink_ptr", "num_splits"]
    assert names(aiter_wheel.flash_attn_fp8_pertensor_func)[3] == "causal"
    assert names(aiter_main.flash_attn_fp8_pertensor_func)[3] == "q_descale"


@BUILDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("asked", [{}, {"causal": True}, {"window": (2, 1)}])
def test_dense_and_packed_are_attention_aligned_bottom_right(build, dtype, asked):
    q, k, v = drawn(1, 5, 4, 64, dtype=dtype), drawn(1, 7, 2, 64, dtype=dtype), drawn(1, 7, 2, 48, dtype=dtype)
    want, want_lse = exact(q, k, v, return_lse=True, **asked)
    given = {"window_size" if name == "window" else name: value for name, value in asked.items()}
    with using(aiter=build):
        module = aiter_module.functions()
        out, lse = module.flash_attn_func(q, k, v, return_lse=True, **given)
        close(out, want)
        close(lse, want_lse)
        out, lse = packed(q[0], k[0], v[0], module=module, return_lse=True, **given)
    close(out, want[0])
    close(lse, want_lse[0])


def test_results_are_one_tensor_unless_more_is_asked_for():
    q = drawn(1, 4, 2, 64)
    assert isinstance(aiter_wheel.flash_attn_func(q, q, q), torch.Tensor)
    assert len(aiter_wheel.flash_attn_func(q, q, q, return_lse=True)) == 2


def test_a_gradient_without_return_lse_is_an_assertion_without_words():
    q = drawn(1, 4, 2, 64).requires_grad_()
    with pytest.raises(AssertionError):
        aiter_wheel.flash_attn_func(q, q, q)
    with torch.no_grad():
        aiter_wheel.flash_attn_func(q, q, q)
    aiter_wheel.flash_attn_func(q, q, q, return_lse=True)[0].sum().backward()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("softcap", [0.0, 1.5])
def test_gradients(softcap):
    q, k, v = (drawn(n, 2, 64).requires_grad_() for n in (5, 7, 7))
    out, _ = packed(q, k, v, causal=True, logits_soft_cap=softcap, return_lse=True, deterministic=True)
    found = torch.autograd.grad(out.float().square().sum(), (q, k, v))
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    want = reference_attention(*(t[None] for t in leaves), causal=True, softcap=softcap)
    for one, right in zip(found, torch.autograd.grad(want.square().sum(), leaves), strict=True):
        torch.testing.assert_close(one.double(), right, atol=6e-2, rtol=2e-2)


def test_the_gradient_of_the_lse_is_dropped():
    q = drawn(1, 4, 2, 64).requires_grad_()
    _, lse = aiter_wheel.flash_attn_func(q, q, q, return_lse=True)
    assert torch.autograd.grad(lse.sum(), q)[0].eq(0).all()
    with using(lint=True), pytest.raises(LintError, match="LSE"):
        aiter_wheel.flash_attn_func(q, q, q, return_lse=True)[1].sum().backward()


def test_rows_that_see_nothing_and_rows_of_no_document():
    q, k = drawn(6, 2, 64), drawn(3, 2, 64)
    out, lse = aiter_wheel.flash_attn_varlen_func(q, k, k, cu(0, 2, 5), cu(0, 0, 3), 3, 3, return_lse=True)
    assert out[:2].eq(0).all()
    assert lse[:, :2].eq(-INF).all()
    assert out[5].isnan().all()
    none = drawn(0, 2, 64)
    out, lse = aiter_wheel.flash_attn_varlen_func(q, none, none, cu(0, 6), cu(0, 0), 6, 0, return_lse=True)
    assert out.eq(0).all()
    assert lse.eq(INF).all()


def test_documents_of_at_most_min_seqlen_q_queries_are_unwritten():
    q = drawn(6, 2, 64)
    out = packed(q, q, q, lengths=([2, 4], [2, 4]), min_seqlen_q=2)
    assert out[:2].isnan().all()
    assert out[2:].isfinite().all()


def test_dense_lengths_are_padding_of_each_sample():
    q, k = drawn(2, 4, 2, 64), drawn(2, 6, 2, 64)
    out = aiter_wheel.flash_attn_func(q, k, k, causal=True, cu_seqlens_q=cu(0, 4, 6), cu_seqlens_kv=cu(0, 6, 9))
    close(out[1, :2], exact(q[1:, :2], k[1:, :3], k[1:, :3], causal=True)[0])
    assert out[1, 2:].isnan().all()
    with pytest.raises(RuntimeError, match="Int"):
        aiter_wheel.flash_attn_func(q, k, k, cu_seqlens_q=torch.tensor([0, 4, 6]))


def test_a_bias_is_of_queries_and_keys_and_of_their_dtype():
    q, k = drawn(1, 3, 2, 64), drawn(1, 5, 2, 64)
    bias = drawn(3, 5)
    out = aiter_wheel.flash_attn_func(q, k, k, bias=bias)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()) * 64**-0.5 + bias.double()
    close(out, torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), k.double()))
    with pytest.raises(RuntimeError, match="bias shape"):
        aiter_wheel.flash_attn_func(q, k, k, bias=bias[:1])
    with using(lint=True), pytest.raises(LintError, match="float32"):
        aiter_wheel.flash_attn_func(q, k, k, bias=bias.float())


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("fp16 and bf16", {"dtype": torch.float32}),
        ("at most 256", {"dim": 264}),
        ("int32", {"cu_q": torch.tensor([0, 4])}),
        ("reads outside", {"cu_q": cu(0, 5)}),
        ("batch size", {"cu_q": cu(0)}),
        ("no query", {"rows": 0, "cu_q": cu(0, 0)}),
    ],
)
def test_refuses(words, change):
    rows = change.get("rows", 4)
    q = drawn(rows, 2, change.get("dim", 64), dtype=change.get("dtype", torch.bfloat16))
    with pytest.raises(RuntimeError, match=words):
        aiter_wheel.flash_attn_varlen_func(q, q, q, change.get("cu_q", cu(0, rows)), cu(0, rows), 4, 4)


def test_paged_keys_beside_padded_boundaries_are_refused():
    q, pool = drawn(2, 2, 64), drawn(2, 128, 2, 64)
    with pytest.raises(NotImplementedError, match="padded"):
        packed(q, pool, pool, lengths=([2], [4]), block_table=cu(0, 1)[None], cu_seqlens_q_padded=cu(0, 2))


def test_pages_are_of_128_rows():
    q, pool = drawn(2, 2, 64), drawn(3, 128, 2, 64)
    out = packed(q, pool, pool, lengths=([2], [140]), block_table=cu(2, 0)[None])
    keys = torch.cat([pool[2], pool[0, :12]])[None]
    close(out, exact(q[None], keys, keys)[0])
    small = pool[:, :64].contiguous()
    with pytest.raises(RuntimeError, match="divisible by 128"):
        packed(q, small, small, lengths=([2], [60]), block_table=cu(2)[None])


@BUILDS
@pytest.mark.parametrize("arch", ["gfx942", "gfx950"])
def test_issue_4455_paged_bf16_keys_of_128_columns_fault(build, arch):
    q, pool = drawn(8, 2, 128), drawn(3, 128, 2, 128)
    with using(arch=arch, aiter=build):
        module = aiter_module.functions()
        with pytest.raises(MemoryFault, match="paged keys as rows"):
            packed(q, pool, pool, module=module, lengths=([8], [200]), block_table=cu(2, 0)[None])
        halves = (t.half() for t in (q, pool, pool))
        assert packed(*halves, module=module, lengths=([8], [200]), block_table=cu(2, 0)[None]).isfinite().all()


def test_issue_4455_is_no_exception_that_a_caller_could_catch():
    assert not issubclass(MemoryFault, Exception)
    assert stack.lints


@pytest.mark.parametrize(
    ("dtype", "dim", "wrong"), [("float16", 128, True), ("bfloat16", 64, True), ("bfloat16", 128, False)]
)
def test_issue_2229_one_query_a_document_is_wrong_on_gfx942(dtype, dim, wrong):
    q, k = drawn(2, 2, dim, dtype=getattr(torch, dtype)), drawn(9, 2, dim, dtype=getattr(torch, dtype))
    want = exact(q[:1, None].transpose(0, 1), k[None, :4], k[None, :4])[0]
    with using(arch="gfx950"):
        close(packed(q, k, k, lengths=([1, 1], [4, 5]))[:1], want)
    with using(arch="gfx942"):
        off = (packed(q, k, k, lengths=([1, 1], [4, 5]))[:1].double() - want).abs().max()
        assert bool(off > 1) == wrong
    if wrong:
        with using(lint=True), pytest.raises(LintError, match="max_seqlen_q 1"):
            packed(q, k, k, lengths=([1, 1], [4, 5]))


def test_the_wheels_packed_bf16_kernels_of_128_columns_do_not_read_softcap():
    q = drawn(8, 2, 128)
    assert packed(q, q, q, logits_soft_cap=0.5).equal(packed(q, q, q))
    with using(lint=True), pytest.raises(LintError, match="logits_soft_cap"):
        packed(q, q, q, logits_soft_cap=0.5)
    with using(aiter=MAIN):
        close(packed(q, q, q, module=aiter_main, logits_soft_cap=0.5), exact(*[q[None]] * 3, softcap=0.5)[0])


@pytest.mark.parametrize("window", [(0, 0), (0, -1)])
def test_a_window_with_a_left_side_of_zero_is_refused_by_the_hand_written_kernels(window):
    q = drawn(8, 2, 128)
    with pytest.raises(RuntimeError, match="invalid argument for fmha_v3_varlen_fwd"):
        packed(q, q, q, window_size=window)
    close(packed(q.half(), q.half(), q.half(), window_size=(0, 0)), q)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1100"])
@BUILDS
def test_it_has_kernels_for_two_chips(arch, build):
    q = drawn(8, 2, 128)
    with using(arch=arch, aiter=build):
        for one in (q, q.half()):
            with pytest.raises(RuntimeError, match=f"no kernel image for {arch}"):
                packed(one, one, one, module=aiter_module.functions())


@pytest.mark.parametrize(
    ("arch", "build", "by_hand"), [("gfx950", WHEEL, True), ("gfx942", WHEEL, False), ("gfx942", MAIN, True)]
)
def test_heads_of_192_over_values_of_128(arch, build, by_hand):
    q, v = drawn(8, 2, 192), drawn(8, 2, 128)
    with using(arch=arch, aiter=build):
        close(packed(q, q, v, module=aiter_module.functions()), exact(q[None], q[None], v[None])[0])
        assert hand_written(q, v, Asked(1.0, False, (-1, -1), 0.0, None, 8, 8, False, 0, packed=True)) == by_hand


def test_a_third_entry_of_a_window_is_read_by_the_main_branch_alone():
    q = drawn(4, 2, 64)
    with using(lint=True), pytest.raises(LintError, match="two entries"):
        packed(q, q, q, window_size=(1, 1, 0))
    with using(aiter=MAIN, lint=True):
        assert packed(q, q, q, module=aiter_main, window_size=(1, 1, 0)).isfinite().all()


def test_inputs_stay_as_they_are():
    q, k = drawn(4, 2, 60), drawn(6, 2, 60)
    kept = [t.clone() for t in (q, k)]
    assert packed(q, k, k, causal=True).shape == q.shape
    assert all(t.equal(one) for t, one in zip((q, k), kept, strict=True))
