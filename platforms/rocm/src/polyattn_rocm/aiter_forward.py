"""Calls of aiter's two functions: dense, and packed documents. They look like FlashAttention 2's and differ in detail.

The packed one has `min_seqlen_q` where FlashAttention 2 has the dropout, so that everything goes by keyword; softcap is
the packed one's alone; an LSE is asked for apart, and must be where there are gradients.
"""

from __future__ import annotations

import importlib
from functools import lru_cache, partial
from typing import Any

import torch

from polyattn.vendor import flash2, positive_scale, reachable, wants_grad

#: Copies of a query where each document has one. With one row, CK's packed kernels answer nonsense on gfx942 (aiter
#: issue 2229, which reports eight rows as right).
_COPIES = 8


@lru_cache(maxsize=1)
def bound() -> tuple[Any, Any]:
    """aiter's functions; importing it compiles, which takes a ROCm toolchain and minutes."""
    module = importlib.import_module("aiter")
    return module.flash_attn_func, module.flash_attn_varlen_func


def batched(
    deterministic: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: flash2.Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> flash2.Result:
    """A slot for "dense". Softcaps, and windows over fewer keys than queries, run as documents of one length."""
    if softcap or (window is not None and q.shape[1] > k.shape[1]):
        return flash2.dense(
            partial(documents, deterministic), q, k, v, out, meta=meta, causal=causal, scale=scale, window=window,
            softcap=softcap, need_lse=need_lse, options=options,
        )  # fmt: skip
    attend, _ = bound()
    k, v = flash2.within_reach(q, k, v, window)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    lse_too = need_lse or wants_grad(q, k, v)
    answer = attend(
        q=reachable(q), k=reachable(k), v=reachable(v), **_asked(deterministic, causal, scale, window, lse_too)
    )
    result, lse = _unwrapped(answer, need_lse)
    return (result if out is None else out.copy_(result)), lse


def documents(
    deterministic: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: flash2.Window,
    softcap: float,
    need_lse: bool,
) -> flash2.Result:
    """The varlen kernel of `polyattn.vendor.varlen`; `out` is copied into."""
    if max_q == 1:  # the last of the copies sees what the query sees, whatever causal and the window are
        q, cu_q, max_q, copies = q.repeat_interleave(_COPIES, dim=0), cu_q * _COPIES, _COPIES, _COPIES
    else:
        copies = 1
    _, attend = bound()
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    lse_too = need_lse or wants_grad(q, k, v)
    answer = attend(
        q=reachable(q), k=reachable(k), v=reachable(v), cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q,
        max_seqlen_k=flash2.most_keys(window, max_q, max_k), min_seqlen_q=0, logits_soft_cap=softcap,
        **_asked(deterministic, causal, scale, window, lse_too),
    )  # fmt: skip
    result, lse = _unwrapped(answer, need_lse)
    if copies > 1:
        result, lse = result[copies - 1 :: copies], None if lse is None else lse[:, copies - 1 :: copies]
    return (result if out is None else out.copy_(result)), lse


def _asked(deterministic: bool, causal: bool, scale: float, window: flash2.Window, need_lse: bool) -> dict[str, Any]:
    """What both functions take, in the package's words."""
    return {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "window_size": flash2.sides(causal, window),
        "deterministic": deterministic, "return_lse": need_lse, "return_attn_probs": False,
    }  # fmt: skip


def _unwrapped(answer: Any, need_lse: bool) -> flash2.Result:
    """The output, and the LSE where it was asked for: one that came for the gradients is theirs, and stays as it is."""
    result, lse = answer if isinstance(answer, tuple) else (answer, None)
    return result, flash2.normal_lse(lse) if need_lse else None
