"""Scenes of the quantised path on A5: the function to come, the released classes, refusals and an earlier commit."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

import polyattn as pa
from tests.emulators.npu import calls, stack


def _qkv(batch: int = 1, queries: int = 70, keys: int = 70) -> list[torch.Tensor]:
    """BSND, two query heads to a key head."""
    torch.manual_seed(0)
    return [torch.randn(batch, n, h, 64, dtype=torch.bfloat16).npu() for n, h in ((queries, 4), (keys, 2), (keys, 2))]


def _error(got: torch.Tensor, *tensors: torch.Tensor, scale: float | None = None) -> float:
    want = pa.reference_attention(*(t.cpu() for t in tensors), scale=scale)
    return float((got.cpu().double() - want).norm() / want.norm())


def public_function() -> None:
    """Each precision near the truth, by the ops and modes that are its own; float4's padding takes part."""
    from mindiesd import quant_attention

    q, k, v = _qkv()
    turn = torch.linalg.qr(torch.randn(64, 64))[0].npu()
    for precision, op, most in (
        ("fp8", "mindiesd::fused_infer_attention_score_v2", 0.08),
        ("mxfp8", "npu::npu_fused_infer_attention_score_v2", 0.08),
    ):
        for layout, place in (("BSND", lambda t: t), ("BNSD", lambda t: t.transpose(1, 2))):
            with calls.recording() as log:
                got = quant_attention(
                    *map(place, (q, k, v)), precision, layout=layout, scale=0.2, q_rot=turn, k_rot=turn
                )
            assert 1e-4 < _error(place(got), q, k, v, scale=0.2) < most, precision
            assert (log[-1].op, log[-1].through) == (op, "mindiesd.quant_attention")
            assert got.dtype == torch.bfloat16
    with calls.recording() as log:
        quant_attention(q, k, v, "fp8", layout="BSND", fp8_fa_mode="C8V16_TILING512")
    assert (log[-1].said()["value_quant_mode"], log[-1].said()["inner_precise"]) == (12, 4)
    two = _qkv(2, 64, 64)
    assert _error(quant_attention(*two, "mxfp8", layout="BSND"), *two) < 0.08
    _four_bits(quant_attention)
    with stack.using(lint=True):
        with pytest.raises(stack.LintError, match="crosses documents"):
            quant_attention(*_qkv(2), "mxfp8", layout="BSND")
        with pytest.raises(stack.LintError, match="next_tokens"):
            quant_attention(q, k, v, "fp8", layout="BSND", next_tokens=0)
    causal = quant_attention(q, k, v, "fp8", layout="BSND", next_tokens=0)
    want = pa.reference_attention(*(t.cpu() for t in (q, k, v)), causal=True)
    assert float((causal.cpu().double() - want).norm() / want.norm()) < 0.08


def _four_bits(quant_attention) -> None:
    q, k, v = _qkv(2, 70, 1024)
    whole = quant_attention(q, k, v, "mxfp4", layout="BSND")
    assert (whole.dtype, whole.shape) == (torch.bfloat16, q.shape)
    assert 0.02 < _error(whole, q, k, v) < 0.5
    short = [t[:, :100] for t in (k, v)]
    got = quant_attention(q.half(), *(t.half() for t in short), "mxfp4", layout="BSND")
    assert got.dtype == torch.bfloat16  # whatever the query's
    full = [torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 412)) for t in short]
    padded = quant_attention(q.half(), *(t.half() for t in full), "mxfp4", layout="BSND")
    assert torch.equal(got.cpu(), padded.cpu())
    lost = pa.reference_attention(q.cpu(), *(t.cpu() for t in full)).norm()
    assert float(got.cpu().double().norm() / lost) == pytest.approx(1, abs=0.2)
    assert _error(got, q, *short) > 0.5
    turned = quant_attention(
        q, k.transpose(1, 2), v.transpose(1, 2), "mxfp4", layout="BSND", layout_kv="BNSD", layout_out="BNSD"
    )
    assert torch.equal(turned.transpose(1, 2).cpu(), whole.cpu())


def released_classes() -> None:
    """3.1.0 has no quant_attention; its own classes run on the same ops."""
    import mindiesd
    from mindiesd.quantization.layer import FP8RotateQuantFA, MXFP8RotateQuantFA

    with pytest.raises(ImportError, match="cannot import name 'quant_attention'"):
        from mindiesd import quant_attention  # noqa: F401
    assert not hasattr(mindiesd, "quant_attention")
    q, k, v = (t.repeat_interleave(4 // t.shape[2], 2) for t in _qkv())
    identity = torch.eye(64, dtype=torch.bfloat16).npu()
    for kind in (FP8RotateQuantFA, MXFP8RotateQuantFA):
        weights = SimpleNamespace(keys=lambda: (), get_tensor=lambda name: identity)
        layer = kind.__new__(kind)
        torch.nn.Module.__init__(layer)
        layer.q_rot, layer.k_rot = weights.get_tensor("q_rot"), weights.get_tensor("k_rot")
        got = layer(q, k, v, layout="BSND")
        assert 1e-4 < _error(got, q, k, v, scale=1 / math.sqrt(64)) < 0.08


def refusals() -> None:
    """The checks in their order, each with its class; then what the kernels refuse."""
    from mindiesd import quant_attention
    from mindiesd.utils.exception import ParametersInvalid

    q, k, v = _qkv()
    bad = torch.zeros(63, 64).npu()
    refused = [
        (ValueError, "precision", (q, k, v, "float"), {}),
        (ValueError, "layout_out", (q, k, v, "mxfp4"), {"layout_out": "BSH"}),
        (TypeError, "attn_mask", (q, k, v, "fp8"), {"attn_mask": None}),
        (TypeError, "fp8_fa_mode", (q, k, v, "mxfp8"), {"fp8_fa_mode": "HIGH_PRECISION"}),
        (ValueError, "layout must", (q, k, v, "fp8"), {"layout": "TND"}),
        (ValueError, "4-D", (q[0], k, v, "fp8"), {}),
        (ValueError, "not empty", (q[:, :0], k, v, "fp8"), {}),
        (ValueError, "float64", (q.double(), k, v, "fp8"), {}),
        (ValueError, "same device", (q, k.cpu(), v, "fp8"), {}),
        (ValueError, "same dtype", (q, k.half(), v, "fp8"), {}),
        (ValueError, "one shape", (q, k, v[:, :5], "fp8"), {}),
        (ValueError, "must be equal", (q[..., :32], k, v, "fp8"), {}),
        (ValueError, "no multiple", (q[:, :, :3], k, v, "fp8"), {}),
        (ValueError, "one batch row", (*_qkv(2), "fp8"), {}),
        (ValueError, "q_rot must be a tensor", (q, k, v, "fp8"), {"q_rot": bad}),
        (ValueError, "k_rot must be on", (q, k, v, "fp8"), {"k_rot": torch.eye(64)}),
        (ValueError, "num_key_value_heads", (q, k, v, "mxfp4"), {"num_key_value_heads": True}),
        (ParametersInvalid, "fp8_fa_mode", (q, k, v, "fp8"), {"fp8_fa_mode": "FAST"}),
    ]
    for kind, words, positional, named in refused:
        with pytest.raises(kind, match=words):
            quant_attention(*positional, **({"layout": "BSND"} | named))
    with stack.using(soc="A2"), pytest.raises(RuntimeError, match="not supported on A2"):
        quant_attention(q, k, v, "mxfp8", layout="BSND")
    zero = quant_attention(q, k, v, "fp8", layout="BSND", scale=0.0)
    assert _error(zero, q, k, v, scale=0.0) < 0.08


def an_earlier_commit() -> None:
    """It has two precisions."""
    from mindiesd import quant_attention

    q, k, v = _qkv()
    assert quant_attention(q, k, v, "mxfp8", layout="BSND").shape == q.shape
    with pytest.raises(ValueError, match="precision must be one of"):
        quant_attention(q, k, v, "mxfp4", layout="BSND")
