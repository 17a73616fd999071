"""Stand-in for SageAttention's Python surface on CPU tensors: the 1.0.6 of the registry, or 2.2.0 built from source.

Scores come from int8 blocks and values from fp16 (fp8 where the architecture's kernel has it), so that errors are of
the vendor's size. Where the real kernels give garbage it raises instead; rows that they leave unwritten hold NaN.

1.0.6 masks what it loads of a last tile and not its scores: the keys that the tile lacks count in the softmax with a
score of 0. Its causal kernels hide them, but walk the scales of keys two at a time, past the end of an odd number.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch.nn.functional import pad

#: What it passes for among installed distributions; `install` states it.
VERSIONS = {"sageattention": "1.0.6"}

_ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm120", "sm121")
_HALF = (torch.float16, torch.bfloat16)
_state = {"arch": "sm90"}


class GarbageError(RuntimeError):
    """The real kernel would answer here, with numbers that mean nothing."""


def install(version: str = "1.0.6", arch: str = "sm90") -> None:
    """Be `sageattention` of that version on a device of that architecture."""
    functions = {"1.0.6": (sageattn_1, sageattn_varlen_1), "2.2.0": (sageattn_2, sageattn_varlen_2)}[version]
    module = ModuleType("sageattention")
    module.__version__ = version
    module.sageattn, module.sageattn_varlen = functions
    if version == "2.2.0":
        module.sageattn_qk_int8_pv_fp16_triton = sageattn_qk_int8_pv_fp16_triton
    VERSIONS["sageattention"], _state["arch"] = version, arch
    sys.modules["sageattention"] = module


def uninstall() -> None:
    """Take the module out again."""
    sys.modules.pop("sageattention", None)


def sageattn_1(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """1.0.6: head dims 64, 96, 128; the caller's K loses its mean; unknown keywords, return_lse too, are swallowed."""
    assert q.dtype in (*_HALF, torch.float32), (
        "Input tensors must be in dtype of torch.float16, torch.bfloat16, or torch.float32."
    )
    _assert_alike(q, k, v)
    assert q.shape[-1] in (64, 96, 128), "headdim should be in [64, 96, 128]."
    _assert_dense_last(q, k, v)
    if smooth_k:
        k -= k.mean(dim=1 if tensor_layout == "NHD" else 2, keepdim=True)
    q, k, v = (_heads_first(tensor, tensor_layout) for tensor in (q, k, v))
    out, _ = _dense_1(q, k, v, is_causal, _scale(q, sm_scale))
    return _back(out, tensor_layout)


def sageattn_varlen_1(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """1.0.6: head dims 64 and 128; the caller's K loses the mean of all its rows, those past the last boundary too."""
    assert q.dtype in (*_HALF, torch.float32), (
        "Input tensors must be in dtype of torch.float16, torch.bfloat16, or torch.float32."
    )
    _assert_alike(q, k, v)
    assert cu_seqlens_q.dtype in (torch.int32, torch.int64), (
        "cu_seqlens_q and cu_seqlens_k must have dtype torch.int32 or torch.int64."
    )
    assert q.shape[-1] in (64, 128), "varlen only support head_dim [64, 128]."
    _assert_dense_last(q, k, v)
    assert cu_seqlens_q.is_contiguous(), "cu_seqlens_q and cu_seqlens_k must be contiguous."
    assert cu_seqlens_k.is_contiguous(), "cu_seqlens_q and cu_seqlens_k must be contiguous."
    if smooth_k:
        k -= k.mean(dim=0, keepdim=True)
    return _varlen(_dense_1, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, is_causal, _scale(q, sm_scale))


def sageattn_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    is_causal: bool = False,
    sm_scale: float | None = None,
    return_lse: bool = False,
    **kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """2.2.0: half precision, head dims to 128, K untouched, LSE on request; attn_mask is swallowed."""
    arch = _state["arch"]
    if arch not in _ARCHS:
        raise ValueError(f"Unsupported CUDA architecture: {arch}")
    values = _fp16 if arch in ("sm80", "sm86") else _fp8
    return _sage_2(q, k, v, tensor_layout, None, is_causal, sm_scale, True, return_lse, values)


def sageattn_qk_int8_pv_fp16_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    tensor_layout: str = "HND",
    quantization_backend: str = "triton",
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    return_lse: bool = False,
    **kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """2.2.0's Triton kernel, the only one with a mask: bool, or additive in q's dtype."""
    if quantization_backend not in ("triton", "cuda"):
        raise ValueError(f"Unsupported quantization backend: {quantization_backend}")
    if attn_mask is not None:
        assert attn_mask.dtype in (torch.bool, q.dtype), "attn_mask must be of dtype bool or the same dtype as q."
        assert attn_mask.device == q.device, "All tensors must be on the same device."
        assert not is_causal, "Mask should be None for causal attention."
        if attn_mask.dtype != torch.bool:
            raise GarbageError("an additive mask meets scores in base 2, unscaled")
        if not attn_mask.any(dim=-1).all():
            raise GarbageError("a row without a visible key gets finite numbers")
    return _sage_2(q, k, v, tensor_layout, attn_mask, is_causal, sm_scale, smooth_k, return_lse, _fp16)


def sageattn_varlen_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    is_causal: bool = False,
    sm_scale: float | None = None,
    smooth_k: bool = True,
    **kwargs: Any,
) -> torch.Tensor:
    """2.2.0: as 1.0.6, but half precision, head dims to 128, and K untouched."""
    _assert_half(q, k, v)
    scale = _scale(q, sm_scale)
    width = q.shape[-1]
    q, k, v = _padded(q, k, v)
    _assert_dense_last(q, k, v)
    assert cu_seqlens_q.is_contiguous(), "cu_seqlens_q and cu_seqlens_k must be contiguous."
    assert cu_seqlens_k.is_contiguous(), "cu_seqlens_q and cu_seqlens_k must be contiguous."
    if smooth_k:
        k = k - k.mean(dim=0, keepdim=True)

    def dense(q, k, v, causal, scale):
        return _dense(q, k, v, None, causal, scale, _fp16)

    return _varlen(dense, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, is_causal, scale)[..., :width]


def _sage_2(q, k, v, layout, mask, causal, sm_scale, smooth_k, return_lse, values):
    _assert_half(q, k, v)
    scale, width = _scale(q, sm_scale), q.shape[-1]
    q, k, v = (_heads_first(tensor, layout) for tensor in _padded(q, k, v))
    _assert_dense_last(q, k, v)
    correction = 0.0
    if smooth_k:
        mean = k.mean(dim=2, keepdim=True)
        repeated = mean.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        correction = (q @ repeated.transpose(2, 3)).squeeze(-1).float() * scale
        k = k - mean
    out, lse = _dense(q, k, v, mask, causal, scale, values)
    out = _back(out[..., :width], layout)
    return (out, lse + correction) if return_lse else out


def _dense(q, k, v, mask, causal, scale, values):
    """[B,H,S,D] -> out in q's dtype, lse [B,H,Sq]."""
    assert q.shape[1] % k.shape[1] == 0, "num_qo_heads must be divisible by num_kv_heads"
    if causal:
        assert q.shape[2] == k.shape[2], "qo_len and kv_len must be equal for causal attention"
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return _attend(q, k, v, mask, scale, values)


def _dense_1(q, k, v, causal, scale):
    """As `_dense`, in tiles of 64 keys that are all counted."""
    if causal:
        answer = _dense(q, k, v, None, causal, scale, _fp16)
        if 0 < k.shape[2] % 128 <= 64:
            raise GarbageError(f"{k.shape[2]} causal keys: the scale of a tile past the last one is read")
        return answer
    rows = (0, 0, 0, -k.shape[2] % 64)
    return _dense(q, pad(k, rows), pad(v, rows), None, causal, scale, _fp16)


def _varlen(dense, q, k, v, cu_q, cu_k, max_q, causal, scale):
    out = torch.full_like(q, float("nan"))
    for (start_q, end_q), (start_k, end_k) in zip(pairwise(cu_q.tolist()), pairwise(cu_k.tolist()), strict=True):
        queries, keys = end_q - start_q, end_k - start_k
        if causal and queries != keys:
            raise GarbageError("causal documents with other keys than queries are computed from the top left")
        rows = slice(start_q, min(end_q, start_q + -(-max_q // 128) * 128))
        if queries == 0:
            continue
        if keys == 0:
            out[rows] = 0.0
            continue
        one = (t.transpose(0, 1).unsqueeze(0) for t in (q[rows], k[start_k:end_k], v[start_k:end_k]))
        out[rows] = dense(*one, causal, scale)[0].squeeze(0).transpose(0, 1)
    return out


def _attend(q, k, v, mask, scale, values):
    group = q.shape[1] // k.shape[1]
    if k.shape[2] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:3], float("-inf"), dtype=torch.float32)
    queries, keys = _int8(q.float() * scale, 128), _int8(k.float(), 64).repeat_interleave(group, 1)
    scores = queries @ keys.transpose(2, 3)
    if mask is not None:
        scores = scores.masked_fill(mask.logical_not(), float("-inf"))
    peak = scores.amax(dim=-1, keepdim=True)
    weights = (scores - peak).exp()
    total = weights.sum(dim=-1, keepdim=True)
    out = values(weights, v.repeat_interleave(group, 1)) / total
    return out.to(q.dtype), (peak + total.log()).squeeze(-1)


def _int8(tensor, block):
    """What is left of [B,H,S,D] once each block of rows has gone through int8 with one scale."""
    rows = tensor.shape[2]
    blocks = pad(tensor, (0, 0, 0, -rows % block)).unflatten(2, (-1, block))
    step = blocks.abs().amax(dim=(3, 4), keepdim=True) / 127.0
    rounded = (blocks / step.masked_fill(step == 0, 1.0)).round() * step
    return rounded.flatten(2, 3).narrow(2, 0, rows)


def _fp16(weights, v):
    return weights.half().float() @ v.half().float()


def _fp8(weights, v):
    """Values in e4m3 with a scale a channel, weights in e4m3."""
    step = v.float().abs().amax(dim=2, keepdim=True) / 448.0
    values = (v.float() / step.masked_fill(step == 0, 1.0)).to(torch.float8_e4m3fn).float() * step
    return (weights * 448.0).to(torch.float8_e4m3fn).float() @ values / 448.0


def _scale(q, sm_scale):
    return q.shape[-1] ** -0.5 if sm_scale is None else sm_scale


def _padded(q, k, v):
    width = q.shape[-1]
    if width > 128:
        raise ValueError(f"Unsupported head_dim: {width}")
    to = 64 if width <= 64 else 128
    return tuple(pad(tensor, (0, to - width)) if width < to else tensor for tensor in (q, k, v))


def _heads_first(tensor, layout):
    if layout not in ("HND", "NHD"):
        raise ValueError(f"tensor_layout {layout} not supported")
    return tensor if layout == "HND" else tensor.transpose(1, 2)


def _back(out, layout):
    return out if layout == "HND" else out.transpose(1, 2).contiguous()


def _assert_half(q, k, v):
    assert q.dtype in _HALF, "Input tensors must be in dtype of torch.float16 or torch.bfloat16"
    _assert_alike(q, k, v)


def _assert_alike(q, k, v):
    assert q.device == k.device == v.device, "All tensors must be on the same device."
    assert q.dtype == k.dtype == v.dtype, "All tensors must have the same dtype."


def _assert_dense_last(q, k, v):
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "Last dim of qkv must be contiguous."
