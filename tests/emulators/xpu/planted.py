"""Backends that each break vllm_xpu_kernels' contract in one way, as an author might; "cpu:breach_causal_kept"."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from polyattn.vendor import Backend, Features, Slot, positive_scale
from tests.emulators.xpu import vllm_fa2

PREFIX = "breach_"
install = vllm_fa2.install


def _attend() -> Any:
    return importlib.import_module("vllm_xpu_kernels.flash_attn_interface").flash_attn_varlen_func


def _even(batch: int, rows: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.arange(batch + 1, dtype=dtype) * rows


def _dense(q: Any, k: Any, v: Any, change: dict[str, Any], asked: dict[str, Any]) -> Any:
    """As many documents of one length as there are samples, with `change` made to what is right."""
    known = {
        "max_seqlen_q": q.shape[1], "cu_seqlens_q": _even(q.shape[0], q.shape[1]), "max_seqlen_k": k.shape[1],
        "cu_seqlens_k": _even(k.shape[0], k.shape[1]), "softmax_scale": asked["scale"], "causal": asked["causal"],
    }  # fmt: skip
    rows = (t.contiguous().flatten(0, 1) for t in (q, k, v))
    return _attend()(*rows, **known | change).unflatten(0, q.shape[:2]), None


def honest(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """The contract kept, and rows without a key made 0."""
    if asked["scale"] <= 0.0:
        q, asked["scale"] = positive_scale(q, asked["scale"])
    return _dense(q, k, v, {}, asked)[0].nan_to_num(0.0), None


def empty_rows_kept(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """A row that sees nothing as it came."""
    return _dense(q, k, v, {}, asked)


def scale_of_zero(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """A scale of 0 as it came: what is hidden is NaN by then."""
    return _dense(q, k, v, {}, asked)[0].nan_to_num(0.0), None


def fa2_order(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """FlashAttention 2's order of arguments."""
    rows = (t.contiguous().flatten(0, 1) for t in (q, k, v))
    bounds = (_even(q.shape[0], q.shape[1]), _even(k.shape[0], k.shape[1]), q.shape[1], k.shape[1])
    return _attend()(*rows, *bounds).unflatten(0, q.shape[:2]), None


def wide_boundaries(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """Boundaries of 64 bits."""
    return _dense(q, k, v, {"cu_seqlens_q": _even(q.shape[0], q.shape[1], torch.int64)}, asked)


def lengths_without_pages(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """seqused_k in the place of boundaries."""
    used = torch.full((k.shape[0],), k.shape[1], dtype=torch.int32)
    return _dense(q, k, v, {"cu_seqlens_k": None, "seqused_k": used}, asked)


def longest_understated(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """A longest document that is too short."""
    return _dense(q, k, v, {"max_seqlen_q": 1}, asked)


def scale_dropped(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """The scale left to the package."""
    return _dense(q, k, v, {"softmax_scale": 1.0}, asked)


def one_document(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """A batch as one long document."""
    ends = {"cu_seqlens_q": _even(1, q.shape[0] * q.shape[1]), "cu_seqlens_k": _even(1, k.shape[0] * k.shape[1])}
    return _dense(q, k, v, ends | {"max_seqlen_q": q.shape[0] * q.shape[1]}, asked)


def batch_as_it_is(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """[B,S,H,D] into a function of packed rows."""
    return _attend()(
        q, k, v, q.shape[1], _even(q.shape[0], q.shape[1]), k.shape[1], cu_seqlens_k=_even(k.shape[0], k.shape[1])
    ), None  # fmt: skip


def softcap_passed_on(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """softcap, which no kernel has."""
    return _dense(q, k, v, {"softcap": 20.0}, asked)


#: Backend -> the cases that it runs.
PLANTED = {
    "honest": ("dense/plain", "dense/causal"),
    "empty_rows_kept": ("dense/causal",),
    "scale_of_zero": ("dense/causal_scale_zero",),
    "fa2_order": ("dense/plain",),
    "wide_boundaries": ("dense/plain",),
    "lengths_without_pages": ("dense/plain",),
    "longest_understated": ("dense/plain",),
    "scale_dropped": ("dense/plain",),
    "one_document": ("dense/plain",),
    "batch_as_it_is": ("dense/plain",),
    "softcap_passed_on": ("dense/plain",),
}


def __getattr__(name: str) -> Any:
    planted = name.removeprefix(PREFIX)
    if planted not in PLANTED:
        raise AttributeError(f"no planted backend {planted!r}; there are {', '.join(PLANTED)}")
    features = Features(causal=True, dtypes=frozenset({"bfloat16"}), head_dims={64}, compile=False)
    return lambda: Backend(name, (Slot(f"{__name__}:{planted}", features),))
