"""`polyattn_cuda.quantise` by plain formulas, in the place of its Triton kernels, which take no CPU tensor."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

_LARGEST = 448.0


class Quantised(NamedTuple):
    """q, k, v in e4m3, and float32 descales [B,Hk] (packed: [documents,Hk]), of q too."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor


@torch.no_grad()
def batched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotate: bool,
    used_q: torch.Tensor | None = None,
    used_k: torch.Tensor | None = None,
) -> Quantised:
    """A scale for each sample and KV head; rows from used[b] on do not count, and become 0."""
    heads = k.shape[2]
    ends = [[t.shape[1]] * t.shape[0] if used is None else used.tolist() for t, used in ((q, used_q), (k, used_k))]
    parts = [
        [_small(t[b, : end[b]], heads, rotated) for b in range(t.shape[0])]
        for t, end, rotated in ((q, ends[0], rotate), (k, ends[1], rotate), (v, ends[1], False))
    ]
    small = [
        torch.stack([_filled(rows, tensor.shape[1]) for rows, _ in part])
        for part, tensor in zip(parts, (q, k, v), strict=True)
    ]
    return Quantised(*small, *(torch.stack([scale for _, scale in part]) for part in parts))


@torch.no_grad()
def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    rotate: bool,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int | None = None,
    max_k: int | None = None,
) -> Quantised:
    """A scale for each document and KV head; rows past the last boundary become 0."""
    heads = k.shape[1]
    parts = [
        [_small(t[start:end], heads, rotated) for start, end in pairwise(cu.tolist())]
        for t, cu, rotated in ((q, cu_q, rotate), (k, cu_k, rotate), (v, cu_k, False))
    ]
    small = [
        _filled(torch.cat([rows for rows, _ in part]), tensor.shape[0])
        for part, tensor in zip(parts, (q, k, v), strict=True)
    ]
    return Quantised(*small, *(torch.stack([scale for _, scale in part]) for part in parts))


def _small(rows: torch.Tensor, kv_heads: int, rotate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[S,H,D] in e4m3 and its descales [Hk]."""
    wide = rows.float()
    if rotate:
        wide = _rotated(wide)
    group = wide.shape[1] // kv_heads
    finite = wide.abs().nan_to_num(0.0, posinf=0.0)
    largest = (
        finite.unflatten(1, (kv_heads, group)).amax(dim=(0, 2, 3)) if rows.shape[0] else finite.new_zeros(kv_heads)
    )
    descale = largest.clamp(min=1e-20) / _LARGEST
    scaled = wide / descale.repeat_interleave(group).reshape(1, -1, 1)
    return scaled.clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), descale


def _filled(rows: torch.Tensor, length: int) -> torch.Tensor:
    """With rows of 0 behind, up to `length`."""
    behind = rows.new_zeros(length - rows.shape[0], *rows.shape[1:], dtype=torch.float32)
    return torch.cat([rows.float(), behind]).to(rows.dtype)


def _rotated(wide: torch.Tensor) -> torch.Tensor:
    """Times an orthonormal Hadamard matrix on each block of the last axis."""
    block = min(wide.shape[-1] & -wide.shape[-1], 128)
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < block:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return (wide.unflatten(-1, (-1, block)) @ (matrix * block**-0.5)).flatten(-2)
