"""torch.nn.attention.varlen: the FlashAttention that torch itself brings, from torch 2.10 on."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch

from polyattn.vendor import Backend, Features, Machine, Request, Requires, Slot, positive_scale, varlen, varlen_padding
from polyattn_cuda import flash2
from polyattn_cuda.flash2 import Result, Window
from polyattn_cuda.layout import reachable
from polyattn_cuda.rows import ROWS

_MODULE = "torch.nn.attention.varlen"


def _parameters() -> frozenset[str]:
    """What this torch's `varlen_attn` takes, which grew with each release; nothing before 2.10."""
    if importlib.util.find_spec(_MODULE) is None:
        return frozenset()
    return frozenset(inspect.signature(importlib.import_module(_MODULE).varlen_attn).parameters)


PARAMETERS = _parameters()


@lru_cache(maxsize=1)
def _bound() -> tuple[Any, Any]:
    module = importlib.import_module(_MODULE)
    return module.varlen_attn, module.AuxRequest(lse=True)


def documents(
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
    """The varlen kernel of `polyattn.vendor.varlen`; it writes no buffer, so that `out` is copied into."""
    result, lse = _attend(
        q, reachable(k), reachable(v), cu_q, cu_k, max_q, max_k, causal, scale, window, need_lse, {}
    )  # fmt: skip
    return (result if out is None else out.copy_(result)), lse


def pages(
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
    """The paged kernel of `polyattn_cuda.flash2`."""
    more = {"seqused_k": used, "block_table": table}
    return _attend(q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, window, need_lse, more)


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
    asked = _asked(causal, scale, window) | more
    if k.shape[-2] != q.shape[-2]:
        asked["enable_gqa"] = True
    answer = attend(
        reachable(q), k, v, cu_seq_q=cu_q, cu_seq_k=cu_k, max_q=flash2.least_queries(q, k, max_q),
        max_k=flash2.most_keys(window, max_q, max_k), return_aux=with_lse if need_lse else None, **asked,
    )  # fmt: skip
    if not need_lse:
        return answer, None
    return answer[0], flash2.normal_lse(answer[1])


def _asked(causal: bool, scale: float, window: Window) -> dict[str, Any]:
    """Causal, scale and window in this torch's words."""
    if "window_size" not in PARAMETERS:
        return {"is_causal": causal}
    asked: dict[str, Any] = {"scale": scale, "window_size": flash2.sides(causal, window)}
    if "num_splits" in PARAMETERS:  # 1 keeps the answer free of the other documents, and torch on this kernel
        asked["num_splits"] = 1
    return asked


dense = partial(flash2.dense, documents)
packed = partial(varlen.packed, partial(flash2.documents, documents), ROWS)
key_padding = partial(varlen_padding.key_padding, documents, ROWS)
paged = partial(flash2.paged, pages)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: FlashAttention 2's rules, and a scale that torch 2.10 does not take."""
    usual = request.head_dim**-0.5
    if "scale" in PARAMETERS or abs(request.scale - usual) <= 1e-6 * usual:
        return flash2.objections(request, machine)
    reason = f"scale {request.scale} is not taken by this torch's varlen_attn, only {usual} (torch 2.11 takes any)"
    return (reason, *flash2.objections(request, machine))


def _slots() -> tuple[Slot, ...]:
    """Each structure twice: with an LSE, which has no gradient, and with gradients, which differ run to run."""
    forward = Features(
        causal=True, window="window_size" in PARAMETERS, lse=True, gqa="enable_gqa" in PARAMETERS, deterministic=True,
        out=True, capture=True, dtypes=flash2.DTYPES, head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    trained = replace(forward, lse=False, deterministic=False, backward=True)
    slots = [
        Slot(f"{__name__}:{kind}", replace(features, kinds=frozenset({kind})))
        for kind in ("dense", "packed", "key_padding")
        for features in (forward, trained)
    ]
    if "block_table" in PARAMETERS:
        over_pages = replace(forward, kinds=frozenset({"paged"}), capture=False, page_sizes=flash2.PAGE_SIZES)
        slots.append(Slot(f"{__name__}:paged", over_pages))
    return tuple(slots)


def backend() -> Backend:
    """`cuda:torch_varlen`, with the features of the installed torch."""
    return Backend(
        "torch_varlen",
        _slots(),
        requires=(Requires("torch", "2.10", "torch.nn.attention.varlen came with it"),),
        check=check,
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
