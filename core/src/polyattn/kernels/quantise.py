"""q, k and v in FP8 (e4m3) with one scale a KV head, for kernels that take descales; q and k rotated on demand.

The rotation multiplies the last axis of q and k by the same orthonormal matrix, so that q @ k.T is unchanged while
outliers are spread over many elements. It is Sylvester's Hadamard matrix times block**-0.5, on each block of the head
dimension; `block` is the largest power of two that divides it, at most 128 (D=128: the whole of it; D=96: three blocks
of 32). The matrix is its own inverse, and always the same.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch

from polyattn.kernels import quantise_tiles
from polyattn.kernels.launch import Prepared, launch_prepared, prepare
from polyattn.kernels.quantise_kernels import cast_kernel, largest_kernel

FP8 = torch.float8_e4m3fn


class Quantised(NamedTuple):
    """q, k, v in e4m3, contiguous in the layout that they came in, and what undoes their scales.

    Each descale is float32 [B, Hk] (packed: [documents, Hk]), of q too: value ~ fp8 * descale of its KV head, in the
    rotated basis where q and k were rotated.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor


def quantise_fp8(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotate: bool,
    used_q: torch.Tensor | None = None,
    used_k: torch.Tensor | None = None,
) -> Quantised:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] of one dtype, any strides; a scale for each sample and KV head.

    used_q, used_k    int32 [B] on the device: rows from there on hold anything, do not count, and become 0

    The scale of q is that of the largest value among the query heads of the group. A head that is all zeros stays so.
    The same bits run to run.
    """
    batch, queries = q.shape[:2]
    return _quantised(q, k, v, rotate, used_q, used_k, batch, queries, k.shape[1], packed=False)


def quantise_fp8_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotate: bool,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int | None = None,
    max_k: int | None = None,
) -> Quantised:
    """`quantise_fp8` of documents q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv]; rows past the last boundary become 0.

    Each document has its own scales, descales are [documents, Hk]. cu_q and cu_k are int32 [documents + 1] on the
    device; max_q and max_k, the longest documents, only spare programs that would find nothing to do.
    """
    documents = cu_q.shape[0] - 1
    longest = (q.shape[0] if max_q is None else max_q, k.shape[0] if max_k is None else max_k)
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    found = _quantised(q, k, v, rotate, cu_q, cu_k, documents, *longest, packed=True)
    return found._replace(q=found.q.squeeze(0), k=found.k.squeeze(0), v=found.v.squeeze(0))


def _quantised(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotate: bool,
    ends_q: torch.Tensor | None,
    ends_k: torch.Tensor | None,
    samples: int,
    length_q: int,
    length_k: int,
    *,
    packed: bool,
) -> Quantised:
    """Of `samples` samples or documents with programs for the given lengths."""
    q, k, v = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (q, k, v))
    ends_q, ends_k = (None if ends is None else ends.contiguous() for ends in (ends_q, ends_k))
    layouts = tuple((tensor.shape, tensor.stride()) for tensor in (q, k, v))
    plan = _plan(samples, max(length_q, 1), max(length_k, 1), rotate, packed, *layouts)
    largest = torch.zeros(plan.scales_shape, dtype=torch.int32, device=q.device)
    descale = torch.empty(plan.scales_shape, dtype=torch.float32, device=q.device)
    cast = [torch.empty(tensor.shape, dtype=FP8, device=q.device) for tensor in (q, k, v)]
    launch_prepared(plan.largest, plan.largest_grid, q.device, ends_q, ends_k, largest, q, k, v)
    launch_prepared(plan.cast, plan.cast_grid, q.device, ends_q, ends_k, largest, descale, q, k, v, *cast)
    return Quantised(*cast, *descale.narrow(1, 0, samples).unbind(0))


class _Plan(NamedTuple):
    """Both launches but for their tensors, and the shape of what the first one finds."""

    largest: Prepared
    largest_grid: tuple[int, ...]
    cast: Prepared
    cast_grid: tuple[int, ...]
    scales_shape: tuple[int, ...]


_Layout = tuple[torch.Size, tuple[int, ...]]


@lru_cache(maxsize=1024)
def _plan(
    samples: int, length_q: int, length_k: int, rotate: bool, packed: bool, q: _Layout, k: _Layout, v: _Layout
) -> _Plan:
    (_, rows_q, heads, dim), (_, rows_k, kv_heads, v_dim) = q[0], v[0]
    scales = samples + packed  # the rows past the documents are cast like one of zeros
    cuts = tuple(quantise_tiles.cut(*shape[2:]) for shape, _ in (q, k, v))
    programs = sum(
        -(-length // (cut.tokens * quantise_tiles.LOOPS)) * (cut.units // cut.beside)
        for length, cut in zip((length_q, length_k, length_k), cuts, strict=True)
    )
    block, v_block = cuts[0].block, cuts[2].block
    constants: dict[str, Any] = {
        "BLOCK": block, "IN_HEAD": dim // block, "V_BLOCK": v_block, "V_IN_HEAD": v_dim // v_block,
        "GROUP": heads // kv_heads, "ROTATE": rotate, "PACKED": packed, "LOOPS": quantise_tiles.LOOPS,
        "num_stages": quantise_tiles.STAGES,
    }  # fmt: skip
    for name, cut in zip("QKV", cuts, strict=True):
        constants |= {f"{name}_UNITS": cut.units, f"{name}_BESIDE": cut.beside, f"{name}_TOKENS": cut.tokens}
    strides = [step for _, (batch, row, head, _) in (q, k, v) for step in (0 if packed else batch, row, head)]
    shared = (scales, length_q, length_k, rows_q, rows_k, kv_heads, *strides)
    warps, factor = quantise_tiles.largest_warps(block), block**-0.5 if rotate else 1.0
    largest = prepare(largest_kernel, samples, *shared, num_warps=warps, **constants)
    cast = prepare(
        cast_kernel, scales, *shared, FACTOR=factor, num_warps=quantise_tiles.CAST_WARPS, **constants
    )  # fmt: skip
    return _Plan(largest, (samples * programs,), cast, (scales * programs,), (3, scales, kv_heads))
