"""Slots over two functions that are called as FlashAttention 2's package calls its own; who has them binds them.

`bound` gives the two, dense and packed, on first use. They take and return what flash-attn 2.8 documents:

    dense(q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, deterministic, return_attn_probs)
    packed(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ..., block_table)
        -> out, or (out, lse, probs); the LSE in float32, [B,H,Sq] or [H,T]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polyattn.backends import flash2, varlen
from polyattn.backends.calls import Result
from polyattn.backends.fused import positive_scale
from polyattn.backends.layout import reachable
from polyattn.backends.visibility import Window
from polyattn.door.backend import Features, Slot

Bound = Callable[[], tuple[Callable[..., Any], Callable[..., Any]]]


def batched(
    bound: Bound,
    deterministic: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A slot for "dense"; it writes no buffer, so that `out` is copied into. `deterministic`: its gradients.

    Windows over fewer keys than queries run as documents, whose most keys can be stated (`flash2.most_keys`).
    """
    if window is not None and q.shape[1] > k.shape[1]:
        return varlen.batched(
            partial(documents, bound, deterministic), q, k, v, out, meta=meta, causal=causal, scale=scale,
            window=window, softcap=softcap, need_lse=need_lse, options=options,
        )  # fmt: skip
    attend, _ = bound()
    k, v = flash2.within_reach(q, k, v, window)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    answer = attend(
        q=reachable(q), k=reachable(k), v=reachable(v),
        **asked(deterministic, causal, scale, window, softcap, need_lse),
    )  # fmt: skip
    result, lse = unwrapped(answer, need_lse)
    return (result if out is None else out.copy_(result)), lse


def documents(
    bound: Bound,
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
    window: Window,
    softcap: float,
    need_lse: bool,
) -> Result:
    """The varlen kernel of `polyattn.vendor.varlen`; `out` is copied into."""
    call = asked(deterministic, causal, scale, window, softcap, need_lse)
    most = flash2.most_keys(window, max_q, max_k)
    result, lse = _of_documents(bound, q, reachable(k), reachable(v), cu_q, cu_k, max_q, most, call)
    return (result if out is None else out.copy_(result)), lse


def pages(
    bound: Bound,
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
    """The paged kernel of `flash2.paged`; `cu_k` says what `used` says."""
    call = asked(False, causal, scale, window, softcap, need_lse) | {"block_table": table}
    return _of_documents(bound, q, k, v, cu_q, cu_k, max_q, flash2.most_keys(window, max_q, max_k), call)


def _of_documents(
    bound: Bound,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    call: dict[str, Any],
) -> Result:
    _, attend = bound()
    if call["softmax_scale"] <= 0.0:
        q, call["softmax_scale"] = positive_scale(q, call["softmax_scale"])
    answer = attend(
        q=reachable(q), k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        max_seqlen_q=flash2.least_queries(q, k, max_q), max_seqlen_k=max_k, **call,
    )  # fmt: skip
    return unwrapped(answer, call["return_attn_probs"])


def asked(
    deterministic: bool, causal: bool, scale: float, window: Window, softcap: float, need_lse: bool
) -> dict[str, Any]:
    """What both functions take, in the package's words; its "probs" bring the LSE, and are empty without dropout."""
    return {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "window_size": flash2.sides(causal, window),
        "softcap": softcap, "deterministic": deterministic, "return_attn_probs": need_lse,
    }  # fmt: skip


def unwrapped(answer: Any, need_lse: bool) -> Result:
    """The package's answer in our conventions."""
    if not need_lse:
        return answer, None
    result, lse, _ = answer
    return result, flash2.normal_lse(lse)


def slots(module: str, forward: Features, page_sizes: range) -> tuple[Slot, ...]:
    """`module`'s `dense`, `prefix_kv`, `packed`, `key_padding`, each with `_steady` too, and `paged`.

    Each structure with an LSE, which has no gradient; with gradients; with the same gradients run to run, from the
    `_steady` one. `forward`: what the first of these does.
    """
    with_grad = replace(forward, lse=False, backward=True)
    found = []
    for kind in ("dense", "prefix_kv", "packed", "key_padding"):
        kinds = frozenset({kind})
        found.append(Slot(f"{module}:{kind}", replace(forward, kinds=kinds)))
        found.append(Slot(f"{module}:{kind}", replace(with_grad, kinds=kinds, deterministic=False)))
        found.append(Slot(f"{module}:{kind}_steady", replace(with_grad, kinds=kinds)))
    over_pages = replace(forward, kinds=frozenset({"paged"}), capture=False, page_sizes=page_sizes)
    return (*found, Slot(f"{module}:paged", over_pages))
