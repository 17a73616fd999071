"""torch's scaled_dot_product_attention as ROCm builds it: which fused kernel a call would take there.

The numbers are the CPU's, whose rules for masks and for causal from the top left are the same.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from torch.nn import functional

from tests.emulators.rocm import stack

VERSIONS: dict[str, str] = {}
ENV: dict[str, str] = {}
EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"

#: How often each kernel would have run.
counts: Counter[str] = Counter()

_real = functional.scaled_dot_product_attention


def install() -> None:
    """Put it in torch's place."""
    functional.scaled_dot_product_attention = scaled_dot_product_attention


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """q [B,H,Sq,D], k [B,Hk,Sk,D], v [B,Hk,Sk,Dv] -> out [B,H,Sq,Dv]."""
    counts[kernel(query, key, value, attn_mask, is_causal, enable_gqa)] += 1
    return _real(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)


def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, causal: bool, gqa: bool) -> str:
    """ "flash", "efficient" or "math", which holds every score in memory."""
    chip = stack.now().chip
    closed = chip.aotriton_experimental and os.environ.get(EXPERIMENTAL) != "1"
    wide = max(q.shape[-1], v.shape[-1]) > chip.sdpa_head_dim
    if closed or wide or 0 in q.shape or 0 in k.shape:
        return "math"
    half = q.dtype in (torch.float16, torch.bfloat16)
    if half and mask is None and q.shape[-1] == v.shape[-1] and not (causal and q.shape[2] != k.shape[2]):
        return "flash"
    grouped = gqa and q.shape[1] != k.shape[1]
    readable = mask is None or (isinstance(mask, torch.Tensor) and mask.dtype in (torch.bool, q.dtype))
    return "efficient" if (half or q.dtype == torch.float32) and readable and not grouped else "math"
