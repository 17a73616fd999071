"""The extension `flash_attn_2_cuda` under FlashAttention 2's real Python package, on CPU tensors.

That package, without its extension, is in reach after

    FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE \\
        pip install --no-build-isolation --no-deps flash-attn==2.8.3.post2 einops
"""

from __future__ import annotations

import importlib
import sys

import torch

from tests.emulators.cuda import flash2
from tests.emulators.cuda.flash2 import Scores, check

VERSIONS = {"flash-attn": "2.8.3.post2"}

Tensors = list[torch.Tensor]


def install() -> None:
    """Put the extension in place, and let the package's operators, made for cuda tensors alone, run on CPU ones."""
    sys.modules["flash_attn_2_cuda"] = sys.modules[__name__]
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
    _of_rank(4, q, k, v)
    check(q.shape[0] > 0 and q.shape[1] > 0, "batch size must be positive, and an empty grid cannot be launched")
    scores = Scores(softmax_scale, is_causal, window_left, window_right, softcap)
    result, lse = flash2.forward(
        q.flatten(0, 1), _samples(q, k, v), scores, q.shape[1], k.shape[1], _given(out, q, flat=True)
    )
    result = result.view(q.shape) if out is None else out.copy_(result.view(q.shape))
    return [result, lse.view(q.shape[2], *q.shape[:2]).transpose(0, 1).contiguous(), q.new_empty(0), _rng()]


@torch.no_grad()
def varlen_fwd(q, k, v, out, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, alibi_slopes,
               max_seqlen_q, max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_left,
               window_right, softcap, return_softmax, gen) -> Tensors:  # fmt: skip
    """q [T,H,D], k, v [Tk,Hk,D] or pages [N,page,Hk,D] -> out, lse [H,T], p, rng_state."""
    _plain(alibi_slopes, p_dropout, return_softmax)
    check(leftpad_k is None, "leftpad_k is not emulated")
    parts = flash2.documents(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, seqused_k=seqused_k, block_table=block_table
    )
    scores = Scores(softmax_scale, is_causal, window_left, window_right, softcap)
    result, lse = flash2.forward(q, parts, scores, max_seqlen_q, max_seqlen_k, _given(out, q))
    return [result, lse, q.new_empty(0), _rng()]


@torch.no_grad()
def bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, alibi_slopes, p_dropout, softmax_scale, is_causal, window_left,
        window_right, softcap, deterministic, gen, rng_state) -> Tensors:  # fmt: skip
    """Gradients of `fwd`, into dq, dk, dv where they are given."""
    _plain(alibi_slopes, p_dropout, False)
    _of_rank(4, q, k, v)
    scores = Scores(softmax_scale, is_causal, window_left, window_right, softcap)
    found = tuple(torch.empty_like(t.flatten(0, 1)) for t in (q, k, v))
    flat = tuple(t.flatten(0, 1) for t in (dout, q, k, v))
    flash2.backward(*flat, _samples(q, k, v), scores, q.shape[1], k.shape[1], found)
    return [*_delivered(found, (q, k, v), (dq, dk, dv)), _softmax_d(q.shape[0], q.shape[2], q.shape[1])]


@torch.no_grad()
def varlen_bwd(dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, alibi_slopes, max_seqlen_q,
               max_seqlen_k, p_dropout, softmax_scale, zero_tensors, is_causal, window_left, window_right, softcap,
               deterministic, gen, rng_state) -> Tensors:  # fmt: skip
    """Gradients of `varlen_fwd`, into dq, dk, dv where they are given."""
    _plain(alibi_slopes, p_dropout, False)
    parts = flash2.documents(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q)
    scores = Scores(softmax_scale, is_causal, window_left, window_right, softcap)
    found = tuple(torch.empty_like(t) for t in (q, k, v))
    flash2.backward(dout, q, k, v, parts, scores, max_seqlen_q, max_seqlen_k, found)
    return [*_delivered(found, (q, k, v), (dq, dk, dv)), _softmax_d(q.shape[1], q.shape[0])]


@torch.no_grad()
def fwd_kvcache(q, kcache, vcache, k, v, seqlens_k, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k, block_table,
                alibi_slopes, out, softmax_scale, is_causal, window_left, window_right, softcap, is_rotary_interleaved,
                num_splits) -> Tensors:  # fmt: skip
    """q [B,Sq,H,D] over a cache [B,S,Hk,D] or pages [N,page,Hk,D], `seqlens_k` rows of it -> out, lse [B,H,Sq]."""
    _plain(alibi_slopes, 0.0, False)
    unused = (k, v, rotary_cos, rotary_sin, cache_batch_idx, leftpad_k)
    check(all(given is None for given in unused), "appending, rotary, cache_batch_idx and leftpad are not emulated")
    batch, queries = q.shape[:2]
    if block_table is not None:
        check(seqlens_k is not None, "cache_seqlens is needed with a block_table")
        longest = block_table.shape[1] * kcache.shape[1]
        used, cu_k = seqlens_k, torch.zeros(batch + 1, dtype=torch.int32)
        flat_k, flat_v = kcache, vcache
    else:
        longest = kcache.shape[1]
        used = torch.full((batch,), longest, dtype=torch.int32) if seqlens_k is None else seqlens_k
        cu_k = torch.arange(batch + 1, dtype=torch.int32) * longest
        flat_k, flat_v = kcache.flatten(0, 1), vcache.flatten(0, 1)
    cu_q = torch.arange(batch + 1, dtype=torch.int32) * queries
    flat_q = q.flatten(0, 1)
    parts = flash2.documents(flat_q, flat_k, flat_v, cu_q, cu_k, 0, seqused_k=used, block_table=block_table)
    check(all(part.k.shape[0] <= longest for part in parts), "cache_seqlens: more rows than the cache has are read")
    scores = Scores(softmax_scale, is_causal, window_left, window_right, softcap)
    result, lse = flash2.forward(flat_q, parts, scores, queries, longest, _given(out, q, flat=True))
    result = result.view(q.shape) if out is None else out.copy_(result.view(q.shape))
    return [result, lse.view(q.shape[2], batch, queries).transpose(0, 1).contiguous()]


def _plain(alibi_slopes, p_dropout, return_softmax) -> None:
    check(alibi_slopes is None and p_dropout == 0.0 and not return_softmax, "alibi and dropout are not emulated")


def _of_rank(rank: int, *tensors: torch.Tensor) -> None:
    check(all(tensor.dim() == rank for tensor in tensors), f"tensors of rank {rank} are needed")
    flash2.check_tensors(*tensors)


def _samples(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[flash2.Document]:
    width, keys = q.shape[1], k.shape[1]
    return [
        flash2.Document(b * width, (b + 1) * width, k[b], v[b], slice(b * keys, (b + 1) * keys))
        for b in range(q.shape[0])
    ]


def _given(out: torch.Tensor | None, q: torch.Tensor, *, flat: bool = False) -> torch.Tensor | None:
    if out is None:
        return None
    check(out.dtype == q.dtype, "Output must have the same dtype as inputs")
    check(out.stride(-1) == 1, "Output tensor must have contiguous last dimension")
    check(out.shape == q.shape, "out must have q's shape")
    return torch.empty_like(q.flatten(0, 1)) if flat else out


def _delivered(found, like, given) -> Tensors:
    shaped = [grad.view(tensor.shape) for grad, tensor in zip(found, like, strict=True)]
    return [grad if into is None else into.copy_(grad) for grad, into in zip(shaped, given, strict=True)]


def _softmax_d(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.float32)


def _rng() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64)
