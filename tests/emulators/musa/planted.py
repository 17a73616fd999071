"""Backends that each break mate's contract in one way, as an author might; "cpu:breach_window_for_causal" and so on."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from polyattn.vendor import Backend, Features, Slot, positive_scale
from tests.emulators.musa import mate

PREFIX = "breach_"
install = mate.install


def _package() -> Any:
    return importlib.import_module("flash_attn_interface")


def _dense(q: Any, k: Any, v: Any, asked: dict[str, Any], **change: Any) -> Any:
    known = {"softmax_scale": asked["scale"], "causal": asked["causal"]}
    return _package().flash_attn_func(q, k, v, **known | change), None


def _documents(q: Any, k: Any, v: Any, asked: dict[str, Any], **change: Any) -> Any:
    meta = asked["meta"]
    known = {
        "cu_seqlens_q": meta.cu_q, "cu_seqlens_k": meta.cu_k, "max_seqlen_q": meta.max_q, "max_seqlen_k": meta.max_k,
        "softmax_scale": asked["scale"], "causal": asked["causal"],
    }  # fmt: skip
    return _package().flash_attn_varlen_func(q, k, v, **known | change), None


def honest(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """The contract kept."""
    if asked["scale"] <= 0.0:
        q, asked["scale"] = positive_scale(q, asked["scale"])
    return _dense(q, k, v, asked)


def left_on_cpu(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """A batch as documents whose boundaries are on the CPU, wherever q is; right where everything is there."""
    bounds = [torch.arange(t.shape[0] + 1, dtype=torch.int32) * t.shape[1] for t in (q, k)]
    rows = (t.contiguous().flatten(0, 1) for t in (q, k, v))
    known = {"softmax_scale": asked["scale"], "causal": asked["causal"]}
    made = _package().flash_attn_varlen_func(*rows, *bounds, q.shape[1], k.shape[1], **known)
    return made.unflatten(0, q.shape[:2]), None


def window_for_causal(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """Causal said as a window, which the package's own choice of kernel does not survive."""
    return _dense(q, k, v, asked, causal=False, window_size=(-1, 0))


def tuple_kept(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """The LSE asked for, and the pair taken for the output."""
    return _dense(q, k, v, asked, return_softmax_lse=True)


def dropout_passed(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """FlashAttention 2's argument."""
    return _dense(q, k, v, asked, dropout_p=0.0)


def scale_of_zero(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """A scale of 0 as it came: what is hidden is NaN by then."""
    return _dense(q, k, v, asked)


def honest_documents(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """The contract kept."""
    return _documents(q, k, v, asked)


def wide_boundaries(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """Boundaries of 64 bits."""
    return _documents(q, k, v, asked, cu_seqlens_q=asked["meta"].cu_q.long())


def longest_understated(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """A longest document that is too short."""
    return _documents(q, k, v, asked, max_seqlen_q=1)


def no_longest(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """No longest document at all."""
    return _documents(q, k, v, asked, max_seqlen_q=None)


def neighbours_trusted(q: Any, k: Any, v: Any, out: Any, **asked: Any) -> Any:
    """Documents as they are, beside one that is poisoned."""
    return _documents(q, k, v, asked)


#: Backend -> the cases that it runs.
PLANTED = {
    "honest": ("dense/plain", "dense/causal"),
    "left_on_cpu": ("dense/plain",),
    "window_for_causal": ("dense/causal",),
    "tuple_kept": ("dense/plain",),
    "dropout_passed": ("dense/plain",),
    "scale_of_zero": ("dense/causal_scale_zero",),
    "honest_documents": ("packed/plain",),
    "wide_boundaries": ("packed/plain",),
    "longest_understated": ("packed/plain",),
    "no_longest": ("packed/plain",),
    "neighbours_trusted": ("packed/poisoned_document",),
}


def __getattr__(name: str) -> Any:
    planted = name.removeprefix(PREFIX)
    if planted not in PLANTED:
        raise AttributeError(f"no planted backend {planted!r}; there are {', '.join(PLANTED)}")
    kind = PLANTED[planted][0].partition("/")[0]
    features = Features(
        kinds=frozenset({kind}), causal=True, dtypes=frozenset({"bfloat16"}), head_dims={64}, compile=False
    )
    return lambda: Backend(name, (Slot(f"{__name__}:{planted}", features),))
