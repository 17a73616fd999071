"""`pa.attention` on the CPU: what is checked, what is remembered, what comes back."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import polyattn as pa
from polyattn import call

Q = torch.randn(2, 6, 4, 8)
KV = torch.randn(2, 6, 2, 8)


def near(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a.double(), b.double(), atol=tolerance, rtol=0)


def test_a_strided_call_right_after_a_contiguous_one_stays_right() -> None:
    wide = torch.randn(2, 6, 4, 16)
    strided = wide[..., ::2]
    assert strided.shape == Q.shape
    pa.attention(Q, Q, Q)
    near(pa.attention(strided, strided, strided), pa.reference_attention(strided, strided, strided))
    near(pa.attention(Q, Q, Q), pa.reference_attention(Q, Q, Q))


def test_calls_that_differ_in_one_argument_do_not_share_a_plan() -> None:
    scale = 0.3
    variants = [
        {}, {"causal": True}, {"window": 1}, {"window": (1, 2)}, {"softcap": 2.0}, {"scale": scale}, {"scale": 0.0},
        {"structure": pa.KeyPadding.from_lengths([6, 3], 6)}, {"structure": pa.Mask(torch.rand(2, 6) > 0.2)},
    ]  # fmt: skip
    for _ in range(2):
        for arguments in variants:
            near(pa.attention(Q, KV, KV, **arguments), pa.reference_attention(Q, KV, KV, **arguments))


@pytest.mark.parametrize("side", [2**62, 2**63 - 1, 2**63, 2**70])
@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
def test_a_side_beyond_every_length_is_unbounded(backend: str, side: int) -> None:
    for window in ((side, None), (None, side), (2, side), (side, 2)):
        out = pa.attention(Q, KV, KV, window=window, backend=backend)
        same = tuple(None if bound == side else bound for bound in window)
        near(out, pa.reference_attention(Q, KV, KV, window=same))
        near(out, pa.reference_attention(Q, KV, KV, window=window))


def test_a_remembered_plan_still_checks_another_structure_of_the_same_kind() -> None:
    q = torch.randn(6, 2, 8)
    pa.attention(q, q, q, structure=pa.Packed.from_lengths([4, 2]))
    with pytest.raises(ValueError, match="7.*T=6"):
        pa.attention(q, q, q, structure=pa.Packed.from_lengths([4, 3]))


def test_plans_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "_PLAN_LIMIT", 3)
    pa.reload_environment()
    for length in range(2, 9):
        q = torch.randn(1, length, 2, 8)
        pa.attention(q, q, q)
    assert len(call._plans) == 3


def test_plans_keep_no_tensor_alive() -> None:
    q = torch.randn(1, 5, 2, 8)
    out = pa.attention(q, q, q, structure=pa.Mask(torch.ones(1, 5, dtype=torch.bool)))
    dead = [weakref.ref(q), weakref.ref(out)]
    del q, out
    gc.collect()
    assert [ref() for ref in dead] == [None, None]


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"causal": "yes"}, TypeError, ["causal", "'yes'"]),
        ({"window": (1, 2, 3)}, ValueError, ["window", "(1, 2, 3)"]),
        ({"window": -1}, ValueError, ["window", "-1"]),
        ({"window": 1.5}, TypeError, ["window", "1.5"]),
        ({"softcap": -3.0}, ValueError, ["softcap", "-3.0"]),
        ({"softcap": "big"}, TypeError, ["softcap"]),
        ({"scale": float("inf")}, ValueError, ["scale", "inf"]),
        ({"scale": torch.tensor(0.5)}, TypeError, ["scale", "Tensor"]),
        ({"structure": torch.ones(2, 6)}, TypeError, ["structure", "pa.Mask"]),
        ({"options": ("fast",)}, TypeError, ["options", "fast"]),
        ({"out": torch.empty(2, 6, 4, 9)}, ValueError, ["out", "[2, 6, 4, 8]", "[2, 6, 4, 9]"]),
        ({"out": torch.empty(2, 6, 4, 8, dtype=torch.float64)}, ValueError, ["out", "float32", "float64"]),
        ({"backend": "flash_attnn"}, ValueError, ["backend", "flash_attnn", "sdpa"]),
        ({"backend": ""}, None, []),
        ({"quant": "fp9"}, ValueError, ["quant", "fp9", "int8"]),
        ({"structure": pa.Spans([[(1, 3)], []]), "window": 2}, pa.UnsupportedRequest, ["spans", "window"]),
    ],
)
def test_bad_arguments_are_refused_by_name(
    arguments: dict[str, object], error: type[Exception] | None, words: list[str]
) -> None:
    if error is None:
        near(pa.attention(Q, KV, KV, **arguments), pa.reference_attention(Q, KV, KV))  # type: ignore[arg-type]
        return
    with pytest.raises(error) as refusal:
        pa.attention(Q, KV, KV, **arguments)  # type: ignore[arg-type]
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ((Q, KV.double(), KV), TypeError, ["float32", "float64"]),
        ((Q.long(), KV, KV), TypeError, ["q", "int64"]),
        ((Q, KV[:, :5], KV), ValueError, ["k, v", "[2, 5, 2, 8]"]),
        ((Q, KV[:1], KV[:1]), ValueError, ["batch"]),
        ((Q, KV[..., :4], KV), ValueError, ["head_dim"]),
        ((Q[:, :, :3], KV, KV), ValueError, ["multiple", "3", "2"]),
        ((Q[0], KV[0], KV[0]), ValueError, ["[B,S,H,D]"]),
        ((Q, KV.to("meta"), KV), ValueError, ["device", "meta"]),
        ((Q, KV, None), TypeError, ["v", "NoneType"]),
        ((Q[..., :0], KV[..., :0], KV), ValueError, ["head_dim"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    tensors: tuple[object, ...], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as refusal:
        pa.attention(*tensors)  # type: ignore[arg-type]
    for word in words:
        assert word in str(refusal.value)


def test_out_is_written_and_returned() -> None:
    out = torch.full((2, 6, 4, 8), float("nan"))
    assert pa.attention(Q, KV, KV, out=out) is out
    near(out, pa.reference_attention(Q, KV, KV))
    padding = pa.KeyPadding.from_lengths([6, 3], 6)
    out.fill_(float("nan"))
    got, lse = pa.attention(Q, KV, KV, structure=padding, out=out, return_lse=True)
    assert got is out
    near(out, pa.reference_attention(Q, KV, KV, structure=padding))
    assert lse.shape == (2, 4, 6)


def test_out_must_not_be_an_input_nor_need_gradients() -> None:
    q = Q.clone()
    with pytest.raises(ValueError, match="out"):
        pa.attention(q, KV, KV, out=q)
    with pytest.raises(ValueError, match="gradients"):
        pa.attention(q.requires_grad_(), KV, KV, out=torch.empty_like(q))


def test_packed_with_a_leading_one_keeps_it() -> None:
    rows = torch.randn(1, 7, 2, 8)
    documents = pa.Packed.from_lengths([3, 4])
    out, lse = pa.attention(rows, rows, rows, structure=documents, return_lse=True)
    flat, flat_lse = pa.attention(rows[0], rows[0], rows[0], structure=documents, return_lse=True)
    assert out.shape == (1, 7, 2, 8)
    assert lse.shape == (1, 2, 7)
    assert torch.equal(out[0], flat)
    assert torch.equal(lse[0], flat_lse)
    buffer = torch.empty_like(rows)
    assert pa.attention(rows, rows, rows, structure=documents, out=buffer) is buffer
    assert torch.equal(buffer, out)


def test_autocast_casts_as_sdpa_does_and_mixed_dtypes_are_legal_there() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = pa.attention(Q, KV.bfloat16(), KV)
        assert pa.attention(Q.double(), KV.double(), KV.double()).dtype == torch.float64
    assert out.dtype == torch.bfloat16
    near(out, pa.reference_attention(Q, KV, KV), 4e-2)
    assert pa.attention(Q, KV, KV).dtype == torch.float32


def test_autocast_keeps_gradients_in_the_callers_dtype() -> None:
    q = Q.clone().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pa.attention(q, KV, KV).sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


def test_meta_tensors_yield_shapes() -> None:
    q = torch.randn(2, 6, 4, 8, device="meta")
    k = torch.randn(2, 6, 2, 8, device="meta")
    v = torch.randn(2, 6, 2, 5, device="meta")
    out, lse = pa.attention(q, k, v, return_lse=True, causal=True)
    assert (out.shape, out.device.type) == ((2, 6, 4, 5), "meta")
    assert (lse.shape, lse.dtype) == ((2, 4, 6), torch.float32)
    padded = pa.attention(q, k, v, structure=pa.KeyPadding.from_lengths([6, 3], 6))
    assert padded.shape == (2, 6, 4, 5)


@pytest.mark.parametrize(
    ("q", "k", "shape"),
    [
        ((0, 4, 2, 16), (0, 4, 2, 16), (0, 4, 2, 16)),
        ((2, 0, 2, 16), (2, 3, 2, 16), (2, 0, 2, 16)),
        ((1, 3, 2, 16), (1, 0, 2, 16), (1, 3, 2, 16)),
    ],
)
def test_empty_inputs_answer_with_zeros_and_flow_gradients(
    q: tuple[int, ...], k: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    queries = torch.randn(q, requires_grad=True)
    keys = torch.randn(k)
    out, lse = pa.attention(queries, keys, keys, return_lse=True)
    assert out.shape == shape
    assert not out.any()
    assert bool((lse == float("-inf")).all())
    out.sum().backward()
    assert queries.grad is not None
    assert not queries.grad.any()


def test_a_structure_that_keeps_all_keys_runs_dense() -> None:
    with pa.record_routes() as log:
        pa.attention(Q, KV, KV, structure=pa.KeyPadding.from_mask(torch.ones(2, 6, dtype=torch.long)))
    assert "key_padding" not in log.entries[0].request


def test_deterministic_calls_repeat_their_bits() -> None:
    first = pa.attention(Q, KV, KV, causal=True, deterministic=True)
    assert torch.equal(first, pa.attention(Q, KV, KV, causal=True, deterministic=True))


def test_a_host_mask_that_hides_nothing_runs_dense() -> None:
    with pa.record_routes() as log:
        out = pa.attention(Q, KV, KV, structure=pa.Mask(torch.ones(2, 1, 6, 6)[:, 0].bool()))
    assert "mask" not in log.entries[0].request
    assert torch.equal(out, pa.attention(Q, KV, KV))
    with pytest.raises(ValueError, match="Sk=6"):
        pa.attention(Q, KV, KV, structure=pa.Mask(torch.ones(2, 5, dtype=torch.bool)))


def test_a_profiler_shows_the_route_as_a_range():
    q = torch.randn(1, 4, 2, 8)
    with torch.profiler.profile() as profile:
        pa.attention(q, q, q)
    assert "cpu:sdpa" in {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), 10**400, 10**5000], ids=["inf", "nan", "long", "longer"])
def test_a_scale_that_no_float_holds_is_refused_by_name(scale: float) -> None:
    with pytest.raises(ValueError, match="scale: a finite number is needed"):
        pa.attention(Q, Q, Q, scale=scale)
