"""torch-npu's `scaled_dot_product_attention`: by npu_fusion_attention_v3 (its first version on A5), else plain matmuls.

Newer op-plugin sources expand a boolean mask before the call, published releases hand it over as it is (vllm-ascend
#12623): modelled is the latter. What the fused op does not get (additive masks, head dims above 512, 310P) runs as
torch's math does, on the device.
"""

from __future__ import annotations

import torch

from tests.emulators.npu import registry
from tests.emulators.npu.stack import current, require

#: Heads and head dim up to which the fused op is called; what it refuses below them is an error.
HEADS, HEAD_DIM = 2048, 512
#: Side of the mask of a causal call, and its mode: aligned to the first row.
SIDE, FIRST_ROW = 2048, 2
#: Chips without the fused op, and the one that calls its first version.
_UNFUSED, _BY_V1 = ("310P",), ("A5",)
_UNBOUNDED, _HIDDEN = 2147483647, float("-inf")
_OP = "aten::scaled_dot_product_attention"


def register() -> None:
    """In the place of torch's own on tensors of the device, with autograd and below it."""
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        registry.library("aten").impl("scaled_dot_product_attention", attend, key)


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """[B,N,S,D], as torch's own; RuntimeError for what the fused op refuses."""
    require(
        query.dtype == key.dtype == value.dtype,
        f"Expected query, key, and value to have the same dtype, got {query.dtype}, {key.dtype} and {value.dtype}",
    )
    if attn_mask is not None:
        require(
            attn_mask.dtype in (torch.bool, query.dtype),
            f"Expected attn_mask dtype to be bool or to match query dtype, but got {attn_mask.dtype}",
        )
    registry.counts[_OP] += 1
    if not _fused(query, key, value, attn_mask):
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), _HIDDEN)
        out: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
        return out
    require(not (is_causal and attn_mask is not None), "The attn_mask should be none when is_causal is true")
    mask, many_rows = attn_mask, query.shape[2] > 1
    if is_causal:
        mask = torch.ones(SIDE, SIDE, dtype=torch.bool, device=query.device).triu(1)
    elif mask is not None:
        mask = mask.logical_not()
    first = current().soc in _BY_V1 or not hasattr(torch.ops.npu, "npu_fusion_attention_v3")  # older releases
    op = torch.ops.npu.npu_fusion_attention if first else torch.ops.npu.npu_fusion_attention_v3
    fused: torch.Tensor = op(
        query, key, value, query.shape[1], "BNSD", atten_mask=mask,
        scale=query.shape[-1] ** -0.5 if scale is None else scale, keep_prob=1 - dropout_p,
        next_tockens=0 if is_causal else _UNBOUNDED, sparse_mode=FIRST_ROW if is_causal else 0,
        inner_precise=2 if attn_mask is not None and many_rows else 0,
    )[0]  # fmt: skip
    return fused


def _fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> bool:
    return (
        query.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and (mask is None or mask.dtype == torch.bool)
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[1] <= HEADS
        and key.shape[1] <= HEADS
        and query.shape[3] <= HEAD_DIM
        and query.shape[1] % key.shape[1] == 0
        and current().soc not in _UNFUSED
    )
