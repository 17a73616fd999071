"""q, k and v in FP8 (e4m3) with one scale a KV head, for kernels that take descales; q and k rotated on demand.

The rotation multiplies the last axis of q and k by the same orthonormal matrix, so that q @ k.T is unchanged while
outliers are spread over many elements. It is Sylvester's Hadamard matrix times block**-0.5, on each block of the head
dimension; `block` is the largest power of two that divides it, at most 128 (D=128: the whole of it; D=96: three blocks
of 32). The matrix is its own inverse, and always the same.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from polyattn.kernels import quantise_tiles
from polyattn.kernels.launch import launch
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
    q, k, v = (tensor if tensor.stride(3) == 1 else tensor.contiguous() for tensor in (q, k, v))
    batch, queries, heads, dim = q.shape
    keys, kv_heads, v_dim = k.shape[1], k.shape[2], v.shape[3]
    largest = torch.zeros(3, batch, kv_heads, dtype=torch.int32, device=q.device)
    descale = torch.empty(3, batch, kv_heads, dtype=torch.float32, device=q.device)
    q8, k8, v8 = (torch.empty(tensor.shape, dtype=FP8, device=q.device) for tensor in (q, k, v))
    cuts = tuple(quantise_tiles.cut(*tensor.shape[2:]) for tensor in (q, k, v))
    span = quantise_tiles.LOOPS
    programs = sum(
        batch * -(-rows // (cut.tokens * span)) * (cut.units // cut.beside)
        for rows, cut in zip((queries, keys, keys), cuts, strict=True)
    )
    block, v_block = cuts[0].block, cuts[2].block
    constants = {
        "BLOCK": block, "IN_HEAD": dim // block, "V_BLOCK": v_block, "V_IN_HEAD": v_dim // v_block,
        "GROUP": heads // kv_heads, "ROTATE": rotate, "LOOPS": span,
        "num_warps": quantise_tiles.warps(block), "num_stages": quantise_tiles.STAGES,
    }  # fmt: skip
    for name, cut in zip("QKV", cuts, strict=True):
        constants |= {f"{name}_UNITS": cut.units, f"{name}_BESIDE": cut.beside, f"{name}_TOKENS": cut.tokens}
    shared = (batch, queries, keys, used_q, used_k, largest)
    launch(
        largest_kernel, (programs,), q.device,
        *shared, kv_heads, q, *q.stride()[:3], k, *k.stride()[:3], v, *v.stride()[:3], **constants,
    )  # fmt: skip
    launch(
        cast_kernel, (programs,), q.device,
        *shared, descale, kv_heads, q, q8, *q.stride()[:3], k, k8, *k.stride()[:3], v, v8, *v.stride()[:3],
        FACTOR=block**-0.5 if rotate else 1.0, **constants,
    )  # fmt: skip
    return Quantised(q8, k8, v8, *descale.unbind(0))


def quantise_fp8_packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotate: bool, cu_q: torch.Tensor, cu_k: torch.Tensor
) -> Quantised:
    """`quantise_fp8` of packed documents q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv]; rows past the last boundary become 0.

    All documents share one scale a KV head, so that a row's bits do depend on the other documents' largest values; the
    descales are that one, seen [documents, Hk].
    """
    found = quantise_fp8(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), rotate, cu_q[-1:], cu_k[-1:])
    q8, k8, v8 = (tensor.squeeze(0) for tensor in found[:3])
    return Quantised(q8, k8, v8, *(descale.expand(cu_q.shape[0] - 1, -1) for descale in found[3:]))
