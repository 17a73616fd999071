"""The call of `npu_fused_infer_attention_score` itself: inference alone, inputs made contiguous."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from polyattn.vendor import Result

#: The op's names of a window's two sides.
WINDOW_ARGS = ("pre_tokens", "next_tokens")


@lru_cache(maxsize=1)  # torch.ops looks its entries up by name, and torch_npu adds this one when it is imported
def _operator() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    op: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.ops.npu.npu_fused_infer_attention_score
    return op


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, need_lse: bool, **op_args: Any
) -> Result:
    """Attention of samples: q [B,Sq,H,D], k and v [B,Sk,Hk,D] -> out [B,Sq,H,D], lse [B,H,Sq] | None.

    `op_args` are the op's further arguments. What it gives for rows past `actual_seq_lengths`, and as the LSE of a row
    without a key, is nobody's promise.
    """
    return attend_pages(q, k.contiguous(), v.contiguous(), k.shape[2], scale=scale, need_lse=need_lse, **op_args)


def attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_heads: int, *, scale: float, need_lse: bool, **op_args: Any
) -> Result:
    """As `attend`; with `block_table`, k and v are pools [pages,page_size,Hk*D]."""
    out, lse = _operator()(
        query=q.contiguous(), key=k, value=v, num_heads=q.shape[2], num_key_value_heads=kv_heads, input_layout="BSND",
        scale=float(scale), softmax_lse_flag=need_lse, **op_args,
    )  # fmt: skip
    return out, lse.squeeze(-1) if need_lse else None


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    ends_q: tuple[int, ...],
    ends_k: tuple[int, ...],
    scale: float,
    need_lse: bool,
    **op_args: Any,
) -> Result:
    """Attention of documents side by side in [T,H,D]: out [T,H,Dv], lse [H,T] | None.

    ends_q, ends_k: where each document ends; the last end is T. `op_args` have a mask: without one the packed kernel
    of a published stack answers with the mean of V.
    """
    out, lse = _operator()(
        query=q.contiguous(), key=k.contiguous(), value=v.contiguous(), num_heads=q.shape[1],
        num_key_value_heads=k.shape[1], input_layout="TND", scale=float(scale), softmax_lse_flag=need_lse,
        actual_seq_lengths=list(ends_q), actual_seq_lengths_kv=list(ends_k), **op_args,
    )  # fmt: skip
    return out, lse.squeeze(-1).transpose(0, 1) if need_lse else None
