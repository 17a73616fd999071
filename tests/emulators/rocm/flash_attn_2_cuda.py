"""The extension `flash_attn_2_cuda` as ROCm builds it, over Composable Kernel, under flash_attn's real Python package.

Its C++ side names softcap, seqused_k and the left padding of keys without reading them; here that is an error in lint
mode and the vendor's answer outside of it.
"""

from __future__ import annotations

import importlib
import os
import sys

import torch

from tests.emulators.cuda.flash2 import Scores, check
from tests.emulators.rocm import ck, stack

VERSIONS = {"flash-attn": stack.FLASH_ATTN}
TRITON_ROUTE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
#: What changes which of the two the package runs; exactly "TRUE" counts.
ENV: dict[str, str] = {}

Tensors = list[torch.Tensor]


def install() -> None:
    """Put the extension in place, and let the package's operators, made for cuda tensors alone, run on CPU ones."""
    if os.environ.get(TRITON_ROUTE) == "TRUE":
        raise RuntimeError(f"{TRITON_ROUTE}=TRUE: flash_attn takes its Triton route, not its extension")
    sys.modules["flash_attn_2_cuda"] = sys.modules[__name__]
    on_cpu_tensors()


def on_cpu_tensors() -> None:
    """Let flash_attn's operators run on CPU tensors."""
    package = importlib.import_module("flash_attn.flash_attn_interface")
    for name in ("_flash_attn_forward", "_flash_attn_varlen_forward", "_flash_attn_backward",
                 "_flash_attn_varlen_backward"):  # fmt: skip
        operator = getattr(package, name)
        operator.register_kernel("cpu", operator._init_fn)


@torch.no_grad()
def fwd(q, k, v, out, alibi_slopes, p_dropout, softmax_scale, is_causal, window_left, window_right, softcap,
        return_softmax, gen) -> Tensors:  # fmt: skip
    """q [B,Sq,H,D], k, v [B,Sk,Hk,D] -> out, lse [B,H,Sq], p, rng_state."""
    _plain(alibi_slopes, p_dropout, return_softmax)
    _check(q, k, v)
    parts = ck.samples(q, k, v)
    written = torch.empty_like(q.flatten(0, 1), memory_format=torch.contiguous_format)
    scores = _scores(softmax_scale, is_causal, window_left, window_right, softcap)
    lse = ck.forward(q.flatten(0, 1), parts, scores, q.shape[1], k.shape[1], written)
    result = _into(out, written.view(q.shape))
    return [result, ck.per_sample(lse, q.shape[0]), q.new_empty(0), _rng()]


@torch.no_grad()
def varlen_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
               max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_left,
               window_right, softcap, return_softmax, gen) -> Tensors:  # fmt: skip
    """q [T,H,D], k, v [Tk,Hk,D] or pages [N,page,Hk,D] -> out, lse [H,T], p, rng_state."""
    _plain(alibi_slopes, p_dropout, return_softmax)
    _check(q, k, v)
    for name, given in (("seqused_k", seqused_k), ("leftpad_k", leftpad_k)):
        if given is not None:
            stack.silent(f"flash_attn over CK does not read {name}")
    parts = ck.documents(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, block_table)
    written = torch.empty_like(q)
    scores = _scores(softmax_scale, is_causal, window_left, window_right, softcap)
    lse = ck.forward(q, parts, scores, max_seqlen_q, max_seqlen_k, written)
    return [_into(out, written), lse, q.new_empty(0), _rng()]


@torch.no_grad()
def bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, is_causal, window_left,
        window_right, softcap, deterministic, gen, rng_state) -> Tensors:  # fmt: skip
    """Gradients of `fwd`, into dq, dk, dv where they are given."""
    _plain(alibi_slopes, p_dropout, False)
    _check(q, k, v)
    flat = (t.flatten(0, 1) for t in (dout, q, k, v))
    scores = _scores(softmax_scale, is_causal, window_left, window_right, softcap)
    found = ck.backward(
        *flat, ck.samples(q, k, v), scores, q.shape[1], k.shape[1], deterministic=deterministic
    )  # fmt: skip
    shaped = [grad.view(like.shape) for grad, like in zip(found, (q, k, v), strict=True)]
    return [*map(_into, (dq, dk, dv), shaped), torch.zeros(q.shape[0], q.shape[2], q.shape[1])]


@torch.no_grad()
def varlen_bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
               max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_left, window_right, softcap,
               deterministic, gen, rng_state) -> Tensors:  # fmt: skip
    """Gradients of `varlen_fwd`, into dq, dk, dv where they are given."""
    _plain(alibi_slopes, p_dropout, False)
    _check(q, k, v)
    parts = ck.documents(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    scores = _scores(softmax_scale, is_causal, window_left, window_right, softcap)
    found = ck.backward(dout, q, k, v, parts, scores, max_seqlen_q, max_seqlen_k, deterministic=deterministic)
    return [*map(_into, (dq, dk, dv), found), torch.zeros(q.shape[1], q.shape[0])]


@torch.no_grad()
def fwd_kvcache(q, kcache, vcache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k, block_table,
                alibi_slopes, out, softmax_scale, is_causal, window_left, window_right, softcap, is_rotary_interleaved,
                num_splits) -> Tensors:  # fmt: skip
    """q [B,Sq,H,D] over a cache [B,S,Hk,D] or pages [N,page,Hk,D], `seqlens_k` rows of it -> out, lse [B,H,Sq]."""
    _plain(alibi_slopes, 0.0, False)
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx)
    check(all(given is None for given in unused), "appending, rotary and cache_batch_idx are not emulated")
    check(num_splits <= 128, "num_splits greater than 128 is not supported")
    if leftpad_k is not None:
        stack.silent("flash_attn over CK does not read cache_leftpad")
    if seqlens_k is None:
        stack.silent("flash_attn over CK takes a cache without cache_seqlens for an empty one")
        seqlens_k = torch.zeros(q.shape[0], dtype=torch.int32)
    check(seqlens_k.dtype == torch.int32, "seqlens_k must have dtype int32")
    check(seqlens_k.is_contiguous() and seqlens_k.shape == (q.shape[0],), "seqlens_k must have shape (batch_size)")
    width = q.shape[-1]
    q, kcache, vcache = (torch.nn.functional.pad(t, (0, -width % 8)) for t in (q, kcache, vcache))
    _check(q, kcache, vcache)
    longest = kcache.shape[1] if block_table is None else block_table.shape[1] * kcache.shape[1]
    check(max(seqlens_k.tolist()) <= longest, "cache_seqlens: more rows than the cache has are read")
    parts = _cached(q, kcache, vcache, seqlens_k, block_table)
    written = torch.empty_like(q.flatten(0, 1), memory_format=torch.contiguous_format)
    scores = _scores(softmax_scale, is_causal, window_left, window_right, softcap)
    lse = ck.forward(q.flatten(0, 1), parts, scores, q.shape[1], longest, written)
    result = written.view(q.shape)[..., :width]
    return [_into(out, result), ck.per_sample(lse, q.shape[0])]


def _cached(q, kcache, vcache, seqlens_k, block_table) -> list[ck.Document]:
    batch, queries = q.shape[:2]
    bounds_q = torch.arange(batch + 1, dtype=torch.int32) * queries
    if block_table is not None:
        bounds_k = torch.nn.functional.pad(seqlens_k.cumsum(0), (1, 0)).int()
        return ck.documents(q.flatten(0, 1), kcache, vcache, bounds_q, bounds_k, queries, block_table)
    check(kcache.shape[0] == batch, "kcache must have shape (batch_size_c, seqlen_k, num_heads_k, head_size_og)")
    return [
        part._replace(k=part.k[:keys], v=part.v[:keys])
        for part, keys in zip(ck.samples(q, kcache, vcache), seqlens_k.tolist(), strict=True)
    ]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    check(stack.now().chip.flash_attn_ck, f"no kernel image for {stack.now().arch}: built for gfx90a, gfx942, gfx950")
    check(q.shape[-1] == v.shape[-1], "v must have shape (..., num_heads_k, head_size)")
    ck.check_tensors(q, k, v)


def _scores(scale: float, causal: bool, left: int, right: int, softcap: float) -> Scores:
    if softcap:
        stack.silent(f"flash_attn over CK does not read softcap={softcap}")
    return Scores(scale, causal, left, right, 0.0)


def _plain(alibi_slopes, p_dropout, return_softmax) -> None:
    check(alibi_slopes is None and p_dropout == 0.0 and not return_softmax, "alibi and dropout are not emulated")


def _into(given: torch.Tensor | None, found: torch.Tensor) -> torch.Tensor:
    if given is None:
        return found
    check(given.dtype == found.dtype, "Output must have the same dtype as inputs")
    check(given.stride(-1) == 1, "Output tensor must have contiguous last dimension")
    check(given.shape == found.shape, "out must have shape (..., num_heads, head_size)")
    return given.copy_(found)


def _rng() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64)
