"""torch.nn.attention.varlen: the FlashAttention that torch brings from 2.10 on, for whoever's devices have it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from polyattn.backends import flash2
from polyattn.backends.calls import Result
from polyattn.backends.fused import positive_scale
from polyattn.backends.layout import reachable
from polyattn.backends.visibility import Window
from polyattn.door.backend import Requires
from polyattn.door.request import Request

_MODULE = "torch.nn.attention.varlen"


def _parameters() -> frozenset[str]:
    """What this torch's `varlen_attn` takes, which grew with each release; nothing before 2.10."""
    if importlib.util.find_spec(_MODULE) is None:
        return frozenset()
    return frozenset(inspect.signature(importlib.import_module(_MODULE).varlen_attn).parameters)


PARAMETERS = _parameters()


def needs(version: str) -> Requires:
    """The torch that a platform's devices need for it, 2.10 at least."""
    return Requires("torch", version, f"{_MODULE} came with 2.10")


@lru_cache(maxsize=1)
def _bound() -> tuple[Callable[..., Any], Any]:
    module = importlib.import_module(_MODULE)
    return module.varlen_attn, module.AuxRequest(lse=True)


def documents(
    more: Callable[[], dict[str, Any]],
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
    window: Window,
    softcap: float,
    need_lse: bool,
) -> Result:
    """The varlen kernel of `polyattn.vendor.varlen`; it writes no buffer, so that `out` is copied into.

    `more`: what the platform asks of this torch besides.
    """
    result, lse = _attend(
        q, reachable(k), reachable(v), cu_q, cu_k, max_q, max_k, causal, scale, window, need_lse, more()
    )
    return (result if out is None else out.copy_(result)), lse


def pages(
    more: Callable[[], dict[str, Any]],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    table: torch.Tensor,
    used: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
) -> Result:
    """The paged kernel of `flash2.paged`."""
    call = more() | {"seqused_k": used, "block_table": table}
    return _attend(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window, need_lse, call)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: Window,
    need_lse: bool,
    more: dict[str, Any],
) -> Result:
    attend, with_lse = _bound()
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    call = asked(causal, scale, window) | more
    if k.shape[-2] != q.shape[-2]:
        call["enable_gqa"] = True
    answer = attend(
        reachable(q), k, v, cu_seq_q=cu_q, cu_seq_k=cu_k, max_q=flash2.least_queries(q, k, max_q),
        max_k=flash2.most_keys(window, max_q, max_k), return_aux=with_lse if need_lse else None, **call,
    )  # fmt: skip
    if not need_lse:
        return answer, None
    return answer[0], flash2.normal_lse(answer[1])


def asked(causal: bool, scale: float, window: Window) -> dict[str, Any]:
    """Causal, scale and window in this torch's words."""
    if "window_size" not in PARAMETERS:
        return {"is_causal": causal}
    return {"scale": scale, "window_size": flash2.sides(causal, window)}


def other_scale(request: Request) -> tuple[str, ...]:
    """Against a scale that torch 2.10 does not take."""
    usual = request.head_dim**-0.5
    if "scale" in PARAMETERS or abs(request.scale - usual) <= 1e-6 * usual:
        return ()
    return (f"scale {request.scale} is not taken by this torch's varlen_attn, only {usual} (torch 2.11 takes any)",)
