"""torch on ROCm: its varlen attention over AOTriton, and which kernel SDPA takes."""

from __future__ import annotations

import pytest
import torch

from polyattn.reference import reference_attention
from tests.emulators.rocm import aten_flash, sdpa
from tests.emulators.rocm.stack import CHIPS, LintError, using


@pytest.fixture(autouse=True)
def bare():
    with using(lint=False):
        yield


def drawn(*shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def cu(*bounds):
    return torch.tensor(bounds, dtype=torch.int32)


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, *, causal=False, window=(-1, -1), **refused):
    out, lse, *_ = aten_flash.forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=0.125, window_size_left=window[0],
        window_size_right=window[1], **refused,
    )  # fmt: skip
    return out, lse


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), atol=2e-2, rtol=0)


def test_a_packed_lse_has_a_row_for_each_sample_and_its_longest():
    q, k = drawn(5, 4, 64), drawn(7, 2, 64)
    out, lse = varlen(q, k, k, cu(0, 3, 5), cu(0, 4, 7), 3, 4)
    assert lse.shape == (2, 4, 3)
    want, want_lse = reference_attention(
        q[None, 3:].double(), k[None, 4:].double(), k[None, 4:].double(), return_lse=True
    )
    close(out[3:], want[0])
    close(lse[1, :, :2], want_lse[0])
    assert lse[1, :, 2].isnan().all()
    with using(torch="2.13.0+rocm7.2.packed"):
        close(varlen(q, k, k, cu(0, 3, 5), cu(0, 4, 7), 3, 4)[1][:, 3:], want_lse[0])


def test_causal_and_windows_are_aligned_top_left():
    q, k = drawn(2, 2, 64), drawn(5, 2, 64)
    out, _ = varlen(q, k, k, cu(0, 2), cu(0, 5), 2, 5, causal=True, window=(-1, 0))
    close(out, reference_attention(q[None].double(), k[None, :2].double(), k[None, :2].double(), causal=True)[0])
    out, _ = varlen(q, k, k, cu(0, 2), cu(0, 5), 2, 5, window=(1, 0))
    close(out, reference_attention(q[None].double(), k[None, :2].double(), k[None, :2].double(), window=(1, 0))[0])


def test_unbounded_window_sides_are_nan_in_the_first_release():
    """pytorch PR 173469: varlen_attn's default window is NaN on ROCm."""
    q = drawn(4, 2, 64)
    with using(torch="2.10.0+rocm7.0"):
        assert varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4)[0].isnan().all()
    assert varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4)[0].isfinite().all()


def test_windows_are_not_read_below_aotriton_0_10():
    q = drawn(4, 2, 64)
    with using(torch="2.8.0+rocm6.4"):
        args = (q, q, q, cu(0, 4), cu(0, 4), 4, 4)
        assert varlen(*args, window=(1, 1))[0].equal(varlen(*args)[0])
        with using(lint=True), pytest.raises(LintError, match="window"):
            varlen(*args, window=(1, 1))


@pytest.mark.parametrize("name", ["seqused_k", "block_table", "alibi_slopes", "num_splits"])
def test_what_it_refuses_by_name(name):
    q = drawn(4, 2, 64)
    with pytest.raises(RuntimeError, match=f"{name} must be nullopt"):
        varlen(q, q, q, cu(0, 4), cu(0, 4), 4, 4, **{name: cu(4)})


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("fp16 and bf16", {"dtype": torch.float32}),
        ("at most 512", {"dim": 520}),
        ("int32", {"cu": torch.tensor([0, 4])}),
        ("batch size must be positive", {"rows": 0, "cu": cu(0, 0)}),
    ],
)
def test_varlen_refuses(words, change):
    rows = change.get("rows", 4)
    q = drawn(rows, 2, change.get("dim", 64), dtype=change.get("dtype", torch.bfloat16))
    bounds = change.get("cu", cu(0, rows))
    with pytest.raises(RuntimeError, match=words):
        varlen(q, q, q, bounds, bounds, 4, 4)


def test_a_causal_backward_wants_equal_longest_lengths():
    q, k = drawn(2, 2, 64), drawn(5, 2, 64)
    none = torch.empty(0)
    asked = (none, none, cu(0, 2), cu(0, 5), 2, 5, 0.0, True, none, none)
    with pytest.raises(RuntimeError, match="seqlen_q must equal seqlen_k"):
        aten_flash.backward(q, q, k, k, *asked)


def test_gradients_of_equal_documents():
    q, dout = drawn(5, 2, 64), drawn(5, 2, 64)
    none = torch.empty(0)
    asked = (none, none, cu(0, 2, 5), cu(0, 2, 5), 3, 3, 0.0, True, none, none)
    got = aten_flash.backward(dout, q, q, q, *asked, scale=0.125)
    exact = [q[None, 2:].double().requires_grad_() for _ in range(3)]
    want = torch.autograd.grad(reference_attention(*exact, causal=True), exact, dout[None, 2:].double())
    for one, right in zip(got, want, strict=True):
        close(one[2:], right[0])


def taken(*, dtype=torch.bfloat16, dim=64, heads=4, kv_heads=4, queries=4, keys=4, mask=None, causal=False):
    q, k = torch.empty(1, heads, queries, dim, dtype=dtype), torch.empty(1, kv_heads, keys, dim, dtype=dtype)
    return sdpa.kernel(q, k, k, mask, causal, heads != kv_heads)


@pytest.mark.parametrize(
    ("kernel", "asked"),
    [
        ("flash", {}),
        ("flash", {"kv_heads": 2}),
        ("flash", {"causal": True}),
        ("efficient", {"causal": True, "keys": 7}),
        ("efficient", {"dtype": torch.float32}),
        ("efficient", {"mask": torch.ones(4, 4, dtype=torch.bool)}),
        ("math", {"mask": torch.ones(4, 4, dtype=torch.bool), "kv_heads": 2}),
        ("math", {"mask": torch.ones(4, 4, dtype=torch.float32)}),
        ("math", {"dtype": torch.float64}),
        ("math", {"dim": 576}),
        ("math", {"keys": 0}),
    ],
)
def test_sdpas_kernel(kernel, asked):
    assert taken(**asked) == kernel


def test_sdpa_on_experimental_chips_is_quadratic_in_memory_unless_asked(monkeypatch):
    monkeypatch.delenv(sdpa.EXPERIMENTAL, raising=False)
    with using(arch="gfx1100"):
        assert taken() == "math"
        monkeypatch.setenv(sdpa.EXPERIMENTAL, "1")
        assert taken() == "flash"
        assert taken(dim=264) == "math"


def test_every_chip_has_its_facts():
    assert {"gfx90a", "gfx942", "gfx950", "gfx1100"} <= set(CHIPS)
    with pytest.raises(KeyError, match="gfx000"), using(arch="gfx000"):
        pass
