"""flash_attn's Triton route on AMD: the launchers of its kernels, under the real package's own interface.

The interface (flash_attn 2.8.3) leaves window, softcap, block_table, seqused_k and num_splits behind before it launches
anything, so they are lost here as there; in lint mode a call with one of them is an error.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import types
from typing import Any

import torch

from tests.emulators.cuda.flash2 import Document, Scores, check, check_boundaries
from tests.emulators.cuda.numerics import attend, band, gradients
from tests.emulators.rocm import stack
from tests.emulators.rocm.flash_attn_2_cuda import TRITON_ROUTE, on_cpu_tensors
from tests.emulators.rocm.triton_overruns import BLOCK, spoil_lse, spoil_out

VERSIONS = {"flash-attn": stack.FLASH_ATTN, "triton": stack.TRITON}
ENV = {TRITON_ROUTE: "TRUE"}

NAN, INF = float("nan"), float("inf")
#: Where the real package has them.
ROOM = "flash_attn.flash_attn_triton_amd"

#: Entry of the interface -> the arguments that it leaves behind, each with what says that it is not used.
LEFT_BEHIND: dict[str, dict[str, Any]] = {
    "fwd": {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0},
    "bwd": {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0},
    "varlen_fwd": {
        "seqused_k": None, "leftpad_k": None, "block_table_": None, "window_size_left": -1, "window_size_right": -1,
        "softcap": 0.0,
    },
    "varlen_bwd": {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0},
    "fwd_kvcache": {
        "cache_leftpad": None, "block_table": None, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
    },
}  # fmt: skip


def install() -> None:
    """Put the launchers in the place of the kernels' modules, and let the package run on CPU tensors."""
    if os.environ.get(TRITON_ROUTE) != "TRUE":
        raise RuntimeError(f"flash_attn takes its Triton route only where {TRITON_ROUTE} is exactly TRUE")
    for name, launchers in _MODULES.items():
        module = types.ModuleType(f"{ROOM}.{name}", "Emulated.")
        for launcher, function in launchers.items():
            setattr(module, launcher, function)
        sys.modules[module.__name__] = module
    interface = importlib.import_module(f"{ROOM}.interface_fa")
    for name, defaults in LEFT_BEHIND.items():
        setattr(interface, name, _watched(name, getattr(interface, name), defaults))
    on_cpu_tensors()


def _watched(name: str, entry: Any, defaults: dict[str, Any]) -> Any:
    order = entry.__code__.co_varnames[: entry.__code__.co_argcount]

    @functools.wraps(entry)
    def watched(*given: Any, **named: Any) -> Any:
        asked = dict(zip(order, given, strict=False)) | named
        for argument, unused in defaults.items():
            value = asked.get(argument, unused)
            # under causal a right side of 0 asks for nothing more
            same = asked["causal"] and argument == "window_size_right" and value == 0
            if not same and value is not unused and (isinstance(value, torch.Tensor) or value != unused):
                stack.silent(f"flash_attn's Triton route does not read {argument} of {name}")
        return entry(*given, **named)

    return watched


@torch.no_grad()
def prefill(q, k, v, o, sm_scale, alibi_slopes, causal, bias, layout, cu_seqlens_q, cu_seqlens_k, max_seqlens_q,
            max_seqlens_k, cache_seqlens, cache_batch_idx, dropout_p, philox_seed, philox_offset, return_softmax,
            use_exp2, descale_q, descale_k, descale_v, descale_o):  # fmt: skip
    """Writes o; the LSE [B,H,Sq], of packed rows [T,H], and no softmax."""
    check(alibi_slopes is None and bias is None and dropout_p == 0.0, "alibi, bias and dropout are not emulated")
    check(q.element_size() > 1, "float8 is not emulated")
    flat, parts = _documents(q, k, v, layout, cu_seqlens_q, cu_seqlens_k)
    lse = torch.zeros(flat.shape[:2], dtype=torch.float32)
    written = torch.zeros(flat.shape, dtype=q.dtype)
    scores = Scores(sm_scale, causal, -1, -1, 0.0)
    for part in parts:
        rows = slice(part.q0, min(part.q1, part.q0 + -(-max_seqlens_q // BLOCK) * BLOCK))
        seen = band(part.q1 - part.q0, part.k.shape[0], -1, 0 if causal else -1)[: rows.stop - rows.start]
        result, row_lse = attend(flat[rows], part.k, part.v, seen, scale=sm_scale)
        written[rows] = result.to(q.dtype) if not scores.broken else NAN
        # causal: a row that sees nothing has 0.0, which is also what one key of score 0 gives
        lse[rows] = row_lse.T.float().masked_fill(row_lse.T.isneginf(), 0.0 if causal else -INF)
    if causal:
        spoil_out(written, parts, max_seqlens_q)
    o.copy_(written.view(o.shape))
    if layout == "bshd":
        return lse.view(*q.shape[:2], -1).transpose(1, 2).contiguous(), None
    if causal:
        spoil_lse(lse, parts, max_seqlens_q)
    return lse, None


@torch.no_grad()
def backward(do, q, k, v, o, softmax_lse, dq, dk, dv, sm_scale, alibi_slopes, causal, layout, cu_seqlens_q,
             cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, philox_seed, philox_offset, use_exp2,
             *descales):  # fmt: skip
    """Writes dq, dk, dv, which come filled with zeros."""
    check(alibi_slopes is None and dropout_p == 0.0, "alibi and dropout are not emulated")
    flat, parts = _documents(q, k, v, layout, cu_seqlens_q, cu_seqlens_k)
    dout = do.flatten(0, 1) if layout == "bshd" else do
    grads = [torch.zeros(t.flatten(0, 1).shape if layout == "bshd" else t.shape, dtype=t.dtype) for t in (dq, dk, dv)]
    for part in parts:
        rows, keys = slice(part.q0, part.q1), part.rows
        seen = band(part.q1 - part.q0, part.k.shape[0], -1, 0 if causal else -1)
        found = gradients(dout[rows], flat[rows], part.k, part.v, seen, scale=sm_scale)
        for grad, place, value in zip(grads, (rows, keys, keys), found, strict=True):
            grad[place] = value.to(grad.dtype)
    for into, grad in zip((dq, dk, dv), grads, strict=True):
        into.copy_(grad.view(into.shape))
    return torch.zeros_like(softmax_lse)


@torch.no_grad()
def decode(q, k_cache, v_cache, k_new, v_new, out, sm_scale, causal, alibi_slopes, layout, cache_seqlens,
           cache_batch_idx):  # fmt: skip
    """Writes out; the LSE [B*H,Sq]. Sample i has the first cache_seqlens[i] rows of k_cache[i]."""
    unused = (k_new, v_new, alibi_slopes, cache_batch_idx)
    check(all(given is None for given in unused), "appending, alibi and cache_batch_idx are not emulated")
    check(q.shape[-1] == k_cache.shape[-1] == v_cache.shape[-1], "Dimensions must match")
    lengths = [k_cache.shape[1]] * q.shape[0] if cache_seqlens is None else cache_seqlens.tolist()
    lse = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32)
    for i, keys in enumerate(lengths):
        check(i < k_cache.shape[0] and keys <= k_cache.shape[1], "k_cache: rows outside the cache are read")
        seen = band(q.shape[1], keys, -1, 0 if causal else -1)
        result, lse[i] = attend(q[i], k_cache[i, :keys], v_cache[i, :keys], seen, scale=sm_scale)
        out[i] = result.to(out.dtype)
    return lse.flatten(0, 1)


def _documents(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: str, cu_q: Any, cu_k: Any
) -> tuple[torch.Tensor, list[Document]]:
    """Packed rows and their documents; strides are free here, and so is the head dim."""
    if layout == "bshd":
        n, m = q.shape[1], k.shape[1]
        return q.flatten(0, 1), [
            Document(b * n, (b + 1) * n, k[b], v[b], slice(b * m, (b + 1) * m)) for b in range(q.shape[0])
        ]
    bounds_q, bounds_k = check_boundaries("cu_seqlens_q", cu_q, q.shape[0]), check_boundaries("cu_k", cu_k, k.shape[0])
    parts = []
    for i in range(len(bounds_q) - 1):
        rows = slice(bounds_k[i], bounds_k[i + 1])
        parts.append(Document(bounds_q[i], bounds_q[i + 1], k[rows], v[rows], rows))
    return q, parts


_MODULES: dict[str, dict[str, Any]] = {
    "fwd_prefill": {"attention_prefill_forward_triton_impl": prefill},
    "bwd_prefill": {"attention_prefill_backward_triton_impl": backward},
    "bwd_prefill_split": {"attention_prefill_backward_triton_split_impl": backward},
    "bwd_prefill_fused": {"_flash_attn_backward": backward},
    "bwd_prefill_onekernel": {"attention_prefill_backward_triton_split_oneKernel_impl": backward},
    "fwd_decode": {"attention_decode_forward_triton_impl": decode},
}
