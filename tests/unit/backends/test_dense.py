"""Dense slots: causal and windows bottom-right for any Sq and Sk, GQA, value dims, scales, strides, dtypes."""

from typing import Any

import pytest
import torch

from polyattn.backends import band, cpu, fused, generic
from polyattn.door.request import Request, TensorFacts
from tests.unit.backends.running import DEFAULTS, IMPLEMENTATIONS, WITH_LSE, assert_equal, batch, expected, heads, run

SIZES = [(5, 5), (2, 5), (5, 2), (1, 6), (6, 1), (11, 11), (9, 14), (14, 9)]


@pytest.fixture(autouse=True)
def blocks_of_four_rows(monkeypatch):
    """Bands of a few rows cross several blocks, the last of them not full."""
    monkeypatch.setattr(band, "_ROWS", 4)
    monkeypatch.setattr(band, "_WINDOW_ROWS", 4)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("queries", "keys"), SIZES)
@pytest.mark.parametrize("causal", [False, True])
def test_causal_at_any_sizes(implementation, queries, keys, causal):
    assert_equal(implementation, *batch(queries, keys, samples=1), causal=causal)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("window", [(0, 0), (1, None), (None, 1), (2, 0), (0, 3), (12, 0), (5, 6)])
@pytest.mark.parametrize(("queries", "keys"), [(5, 5), (2, 7), (7, 2), (9, 14), (14, 9)])
def test_windows_at_any_sizes(implementation, window, queries, keys):
    assert_equal(implementation, *batch(queries, keys, samples=1), window=window)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_causal_is_bottom_right_by_hand(implementation):
    """fault_cases row 10."""
    for queries, values, want in ((2, [1, 2, 3, 4, 5], [2.5, 3.0]), (5, [4, 8], [0, 0, 0, 4, 6])):
        q = torch.zeros(1, queries, 1, 4)
        v = torch.tensor(values, dtype=torch.float32).reshape(1, -1, 1, 1)
        k = torch.zeros(1, len(values), 1, 4)
        out, _ = run(implementation, q, k, v, causal=True)
        assert out.flatten().tolist() == pytest.approx(want)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dim", "v_dim"), [(8, 3), (3, 8), (1, 1), (40, 72)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_value_dims_and_grouped_heads(implementation, dim, v_dim, kv_heads):
    assert_equal(implementation, *batch(4, 6, kv_heads=kv_heads, dim=dim, v_dim=v_dim), causal=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("scale", [0.0, -0.4, 2.0])
def test_scales_that_are_not_positive_keep_hidden_keys_hidden(implementation, scale):
    assert_equal(implementation, *batch(4, 4), causal=True, scale=scale)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("queries", "keys", "call", "unseen"), [
    (3, 6, {"window": (1, 0)}, slice(0, 2)),
    (2, 30, {"window": (20, 0)}, slice(0, 8)),
    (9, 40, {"window": (7, 0)}, slice(0, 24)),
    (9, 14, {"window": (0, 1)}, slice(0, 5)),
])  # fmt: skip
def test_keys_outside_the_band_may_hold_anything(implementation, queries, keys, call, unseen):
    q, k, v = batch(queries, keys)
    want, _ = expected(q, k, v, **call)
    k[:, unseen] = v[:, unseen] = float("nan")
    torch.testing.assert_close(run(implementation, q, k, v, **call)[0], want, atol=1e-9, rtol=0)


@pytest.mark.parametrize("implementation", WITH_LSE)
@pytest.mark.parametrize(("queries", "keys", "call"), [
    (5, 5, {}), (5, 2, {"causal": True}), (2, 5, {"causal": True}), (5, 5, {"window": (1, 1)}),
])  # fmt: skip
def test_the_lse_has_gradients(implementation, queries, keys, call):
    q, k, v = batch(queries, keys)

    def of_lse(function):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        _, lse = function(*leaves)
        lse = lse.masked_fill(lse.isneginf(), 0.0).double()
        weights = torch.arange(lse.numel(), dtype=torch.float64).reshape(lse.shape) % 5
        return torch.autograd.grad((lse * weights).sum(), leaves[:2])

    mine = of_lse(lambda *t: run(implementation, *t, need_lse=True, **call))
    for got, want in zip(mine, of_lse(lambda *t: expected(*t, **call)), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["transposed", "packed qkv", "last dim by twos", "expanded heads", "expanded samples"])
def test_any_strides_give_the_contiguous_bits(implementation, name):
    """fault_cases row 12."""
    q, k, v = batch(33, 33, q_heads=4, kv_heads=4, dim=8, dtype=torch.bfloat16)
    strided = {
        "transposed": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
        "packed qkv": lambda t: torch.stack((t, t + 1, t), dim=2)[:, :, 0],
        "last dim by twos": lambda t: torch.stack((t, t + 1), dim=-1).flatten(-2)[..., ::2],
        "expanded heads": lambda t: t[:, :, :1].expand(t.shape),
        "expanded samples": lambda t: t[:1].expand(t.shape),
    }[name]
    for call in ({}, {"causal": True}, {"window": (3, 0)}):
        views = [q, strided(k), strided(v)]
        before = [view.clone() for view in views]
        got, _ = run(implementation, *views, **call)
        assert torch.equal(got, run(implementation, *(view.contiguous() for view in views), **call)[0])
        assert all(torch.equal(view, kept) for view, kept in zip(views, before, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_plain_slot_is_the_dense_one(dtype):
    for q, k, v in (batch(7, 9, kv_heads=4, dtype=dtype), [t[..., ::2] for t in batch(7, 9, kv_heads=4, dtype=dtype)]):
        plain, lse = cpu.sdpa_plain(q, k, v, None, meta=None, **DEFAULTS)
        assert lse is None
        assert torch.equal(plain, cpu.sdpa_dense(q, k, v, None, meta=None, **DEFAULTS)[0])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 4e-3), (torch.bfloat16, 3e-2), (torch.float32, 2e-5)])
@pytest.mark.parametrize("call", [{}, {"causal": True}, {"window": (10, 4)}])
def test_low_precision_is_accumulated_in_float32(implementation, dtype, tolerance, call):
    q, k, v = batch(50, 90, dim=64, dtype=dtype)
    need = implementation in WITH_LSE
    got, lse = run(implementation, q, k, v, need_lse=need, scale=0.125, **call)
    want, want_lse = expected(q, k, v, scale=0.125, **call)
    assert got.dtype == dtype
    assert (got.double() - want).abs().max() <= tolerance
    if need:
        assert lse.dtype == torch.float32
        assert (lse.double() - want_lse).abs().max() <= tolerance


def test_rows_do_not_depend_on_their_batch():
    q, k, v = batch(40, 64, samples=3, dtype=torch.bfloat16)
    together, _ = run("cpu:sdpa", q, k, v, causal=True)
    for row in range(3):
        alone, _ = run("cpu:sdpa", q[row : row + 1], k[row : row + 1], v[row : row + 1], causal=True)
        assert torch.equal(together[row : row + 1], alone)


def test_the_same_bits_run_to_run_forward_and_backward():
    q, k, v = (heads(2, 70, 4, 16, seed=seed, dtype=torch.float32) for seed in range(3))

    def once():
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out, _ = run("cpu:sdpa", *leaves, causal=True)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    assert all(torch.equal(first, second) for first, second in zip(once(), once(), strict=True))


def test_a_kernel_without_softcap_or_lse_says_so():
    q, k, v = batch(3, 3)
    with pytest.raises(ValueError, match="softcap"):
        run("cpu:sdpa", q, k, v, softcap=1.0)
    with pytest.raises(ValueError, match="need_lse=True"):
        run("generic:sdpa", q, k, v, need_lse=True)


def _facts(*tensors: torch.Tensor) -> list[TensorFacts]:
    return [TensorFacts(tuple(t.shape), t.stride(), str(t.dtype).removeprefix("torch.")) for t in tensors]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("moved", [False, True], ids=["aligned", "misaligned"])
def test_portable_sdpa_bound_to_a_shape_is_the_slot(causal: bool, moved: bool) -> None:
    q, k, v = (torch.randn(2, 9, heads, 16) for heads in (4, 2, 2))
    if moved:
        k = torch.empty(k.numel() + 1)[1:].view(k.shape).copy_(k)
    run = fused.bound_portable(Request(*_facts(q, k, v), causal=causal, scale=0.3), ())
    assert run is not None
    rules = {"causal": causal, "scale": 0.3, "window": None, "softcap": 0.0, "need_lse": False}
    want, _ = generic.sdpa_dense(q, k, v, None, meta=None, options=(), **rules)
    got, lse = run(q, k, v, None, meta=None)
    assert lse is None
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "change",
    [{"window": (1, 1)}, {"out": True}, {"autocast_dtype": "bfloat16"}, {"scale": -1.0}, {"causal": True}],
    ids=lambda change: next(iter(change)),
)
def test_portable_sdpa_is_bound_only_where_torch_does_all_of_it(change: dict[str, Any]) -> None:
    q, k = torch.randn(1, 4, 2, 16), torch.randn(1, 6, 2, 16)
    assert fused.bound_portable(Request(*_facts(q, k, k), **change), ()) is None
    assert fused.bound_portable(Request(*_facts(q, k, k)), ()) is not None
    apart = torch.randn(1, 6, 2, 17)[..., 1:]
    assert fused.bound_portable(Request(*_facts(q, apart, k)), ()) is None
