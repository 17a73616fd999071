"""The call of `npu_fusion_attention` itself, and its LSE."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from polyattn.vendor import Result

#: The op's names of a band's two sides, in its own spelling.
SIDES = ("pre_tockens", "next_tockens")


@lru_cache(maxsize=1)
def _operator() -> Any:
    return torch.ops.npu.npu_fusion_attention


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, need_lse: bool, **asked: Any) -> Result:
    """Attention of samples [B,S,H,D]: out [B,Sq,H,Dv], lse [B,H,Sq] | None, which has no gradient.

    `asked` are the op's further arguments. The LSE of a row that sees nothing is not -inf but some number.
    """
    out, maximum, total, *_ = _operator()(
        query=q, key=k, value=v, head_num=q.shape[2], input_layout="BSND", scale=float(scale), **asked
    )
    return out, lse_of(maximum, total) if need_lse else None


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    ends_q: tuple[int, ...],
    ends_k: tuple[int, ...],
    scale: float,
    need_lse: bool,
    **asked: Any,
) -> Result:
    """Attention of documents side by side in [T,H,D]: out [T,H,Dv], lse [H,T] | None, which has no gradient.

    ends_q, ends_k: where each document ends; the last end is T. A document with queries has keys.
    """
    if need_lse:  # the statistics would lie in the order H, T within each document
        asked["softmax_layout"] = "TND"
    out, maximum, total, *_ = _operator()(
        query=q, key=k, value=v, head_num=q.shape[1], input_layout="TND", scale=float(scale),
        actual_seq_qlen=list(ends_q), actual_seq_kvlen=list(ends_k), **asked,
    )  # fmt: skip
    return out, lse_of(maximum, total).transpose(0, 1) if need_lse else None


def lse_of(maximum: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """From a row's maximum and its sum of exponentials, each of which the op writes eight times."""
    return maximum.select(-1, 0) + total.select(-1, 0).log()
