"""Scenes of torch's SDPA on the emulated device: which op it runs, what that refuses, what polyattn chooses then."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import polyattn as pa
from tests.emulators.npu import registry

_FUSED = ("npu::npu_fusion_attention", "npu::npu_fusion_attention_v3")


def _drawn(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype).npu()


def _fused_calls() -> int:
    return sum(registry.counts[op] for op in _FUSED)


def fused() -> None:
    """Plain, causal from the first row, and a whole mask; a mask of keys and wide values are errors."""
    q, k = _drawn(2, 4, 5, 64), _drawn(2, 2, 7, 64)
    with torch.inference_mode():
        sdpa(q, k, k, enable_gqa=True)
    assert _fused_calls() == 1
    keep = torch.ones(2, 1, 5, 7, dtype=torch.bool).tril(1)
    for asked in ({"is_causal": True}, {"attn_mask": keep.npu()}):
        got = sdpa(q, k, k, enable_gqa=True, **asked)
        on_host = {name: value.cpu() if isinstance(value, torch.Tensor) else value for name, value in asked.items()}
        want = sdpa(*(t.cpu().float() for t in (q, k, k)), enable_gqa=True, **on_host)
        torch.testing.assert_close(got.cpu().float(), want, atol=4e-3, rtol=0)
    assert _fused_calls() == 3
    with pytest.raises(RuntimeError, match="561103"):
        sdpa(q, k, k, keep[:, :, -1:].npu(), enable_gqa=True)
    with pytest.raises(RuntimeError, match="head dims 64, 64, 80"):
        sdpa(q, q, _drawn(2, 4, 5, 80))
    before = _fused_calls()
    sdpa(q, q, _drawn(2, 4, 5, 80), _drawn(1, 4, 1, 5))
    sdpa(*[_drawn(1, 2, 5, 520)] * 3)
    assert _fused_calls() == before, "additive masks and large head dims are torch's math"


def plain() -> None:
    """Torch's math where the chip has no fused op."""
    q = _drawn(2, 4, 5, 64)
    keep = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    keep[1, ..., 3:] = False
    got = sdpa(q, q, _drawn(2, 4, 5, 80), keep.npu())
    want = sdpa(*(t.cpu().float() for t in (q, q, _drawn(2, 4, 5, 80))), keep)
    torch.testing.assert_close(got.cpu().float(), want, atol=4e-3, rtol=0)
    assert _fused_calls() == 0


def automatic() -> None:
    """What SDPA would refuse is another's by itself."""
    q, v = _drawn(2, 7, 2, 64), _drawn(2, 7, 2, 80)
    keep = torch.ones(2, 7, dtype=torch.bool)
    keep[1, 4:] = False
    padded = pa.KeyPadding.from_mask(keep.npu(), queries="all")
    bias = pa.Mask(_drawn(1, 2, 1, 7))
    wide = _drawn(1, 5, 2, 520)
    for tensors, structure in (((q, q, q), padded), ((q, q, v), bias), ((q, q, v), None), ((wide, wide, wide), None)):
        got = pa.attention(*tensors, structure=structure)
        host = {padded: pa.KeyPadding.from_mask(keep, queries="all"), bias: pa.Mask(bias.tensor.cpu())}.get(structure)
        want = pa.reference_attention(*(t.cpu() for t in tensors), structure=host)
        torch.testing.assert_close(got.cpu().double(), want.double(), atol=4e-3, rtol=0)
