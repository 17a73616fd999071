"""Backends that each break the vendor's contract in one way, as an author might; "cpu.rocm_flipped" and so on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polyattn.vendor import Backend, Features, Slot

PREFIX = "planted_"


@dataclass(frozen=True)
class Planted:
    """What a planted backend claims, which cases it is asked, and the emulator that it runs on."""

    kind: str = "packed"
    cases: tuple[str, ...] = ("packed/plain",)
    causal: bool = False
    softcap: bool = False
    window: bool = False
    lse: bool = False
    on: str = "aiter"


def _documents(q: Any, k: Any, v: Any, meta: Any, **asked: Any) -> Any:
    import aiter

    bounds = {"cu_seqlens_q": meta.cu_q, "cu_seqlens_k": meta.cu_k, "max_seqlen_q": meta.max_q}
    return aiter.flash_attn_varlen_func(q, k, v, max_seqlen_k=meta.max_k, **bounds, **asked)


def _written(out: torch.Tensor, meta: Any) -> torch.Tensor:
    """Zero for rows past the last boundary, which the kernel does not write."""
    return out.masked_fill(torch.arange(out.shape[0])[:, None, None] >= meta.cu_q[-1], 0.0)


def honest(q: Any, k: Any, v: Any, out: Any, *, meta: Any, causal: bool, scale: float, **_: Any) -> Any:
    """The contract kept."""
    result, lse = _documents(q, k, v, meta, softmax_scale=scale, causal=causal, return_lse=True)
    covered = torch.arange(q.shape[0]) < meta.cu_q[-1]
    lse = lse.masked_fill(lse.isposinf() | ~covered, float("-inf"))
    return _written(result, meta), lse


def unwritten_rows(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Rows past the last boundary as they came."""
    return _documents(q, k, v, meta, softmax_scale=scale), None


def as_flash_attention(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """FlashAttention 2's order of arguments: its dropout is aiter's min_seqlen_q, its scale aiter's dropout."""
    import aiter

    return aiter.flash_attn_varlen_func(q, k, v, meta.cu_q, meta.cu_k, meta.max_q, meta.max_k, 0.0, scale), None


def long_boundaries(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """Boundaries of 64 bits."""
    import aiter

    cu_q, cu_k = meta.cu_q.long(), meta.cu_k.long()
    return aiter.flash_attn_varlen_func(q, k, v, cu_q, cu_k, meta.max_q, meta.max_k, softmax_scale=scale), None


def shortest_as_minimum(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """min_seqlen_q taken by its name: the shortest document is not computed."""
    shortest = int((meta.cu_q[1:] - meta.cu_q[:-1]).min())
    return _written(_documents(q, k, v, meta, softmax_scale=scale, min_seqlen_q=shortest), meta), None


def rows_first_lse(q: Any, k: Any, v: Any, out: Any, *, meta: Any, scale: float, **_: Any) -> Any:
    """An LSE of [T,H]."""
    result, lse = _documents(q, k, v, meta, softmax_scale=scale, return_lse=True)
    return _written(result, meta), lse.T.contiguous()


def no_scale(q: Any, k: Any, v: Any, out: Any, *, meta: Any, **_: Any) -> Any:
    """The function's own scale."""
    return _written(_documents(q, k, v, meta), meta), None


def ck_softcap(q: Any, k: Any, v: Any, out: Any, *, causal: bool, scale: float, softcap: float, **_: Any) -> Any:
    """A softcap for flash_attn's extension, which does not read it."""
    import flash_attn_2_cuda

    return flash_attn_2_cuda.fwd(q, k, v, None, None, 0.0, scale, causal, -1, -1, softcap, False, None)[0], None


def triton_window(q: Any, k: Any, v: Any, out: Any, *, causal: bool, scale: float, window: Any, **_: Any) -> Any:
    """A window for flash_attn's Triton route, which does not read it."""
    from flash_attn import flash_attn_func

    sides = (-1, -1) if window is None else tuple(-1 if side is None else side for side in window)
    return flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, window_size=sides), None


def triton_lse(q: Any, k: Any, v: Any, out: Any, *, meta: Any, causal: bool, scale: float, **_: Any) -> Any:
    """The packed LSE of flash_attn's Triton route taken for [H,T]."""
    from flash_attn import flash_attn_varlen_func

    result, lse, _ = flash_attn_varlen_func(
        q, k, v, meta.cu_q, meta.cu_k, meta.max_q, meta.max_k, softmax_scale=scale, return_attn_probs=True
    )
    return result, lse


#: Backend -> its claims.
PLANTED = {
    "honest": Planted(cases=("packed/plain", "packed/causal+lse"), causal=True, lse=True),
    "unwritten_rows": Planted(cases=("packed/real_and_pad",)),
    "as_flash_attention": Planted(),
    "long_boundaries": Planted(),
    "shortest_as_minimum": Planted(),
    "rows_first_lse": Planted(lse=True),
    "no_scale": Planted(cases=("packed/scale_given",)),
    "ck_softcap": Planted("dense", ("dense/softcap",), causal=True, softcap=True, on="flash_attn"),
    "triton_window": Planted("dense", ("dense/window",), causal=True, window=True, on="flash_attn_triton"),
    "triton_lse": Planted(lse=True, on="flash_attn_triton"),
}


def _backend(name: str) -> Backend:
    claims = PLANTED[name]
    features = Features(
        kinds=frozenset({claims.kind}), causal=claims.causal, softcap=claims.softcap, window=claims.window,
        lse=claims.lse, dtypes=frozenset({"bfloat16"}), compile=False, head_dims={64},
    )  # fmt: skip
    return Backend(f"{PREFIX}{name}", (Slot(f"{__name__}:{name}", features),))


def __getattr__(name: str) -> Any:
    planted = name.removeprefix(PREFIX)
    if planted not in PLANTED:
        raise AttributeError(f"no planted backend {planted!r}; there are {', '.join(PLANTED)}")
    return lambda: _backend(planted)
