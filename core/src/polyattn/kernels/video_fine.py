"""Exact attention of blocks of query rows over listed key blocks, torch in and torch out.

Forward only; float16, bfloat16 and float32; any head dims up to 256, each its own for keys and values. Nothing outside
of the listed blocks is read. A query row without a key gives 0 and LSE -inf; rows of no query block are not written.
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from polyattn.kernels.launch import launch
from polyattn.kernels.score_factors import score_factors
from polyattn.kernels.video_fine_kernel import listed_kernel
from polyattn.kernels.video_list_kernels import in_order_kernel, steps_kernel
from polyattn.kernels.video_tiles import MOVE_WARPS, PACK_ROWS, STEPS_CHUNK, VideoTile, power_of_two

#: Bytes that one instruction moves, if addresses are multiples of it; the first offset that 32 bits do not hold.
_VECTOR, _INT32 = 16, 1 << 31


class Blocks(NamedTuple):
    """Blocks of rows of a tensor, on the device, int32.

    starts, ends  [n]: the places of each; `largest` is the most rows of one
    order         the tensor's row of each place; None: it is the place
    """

    starts: torch.Tensor
    ends: torch.Tensor
    largest: int
    order: torch.Tensor | None = None

    @property
    def number(self) -> int:
        """How many there are."""
        return self.starts.shape[0]


class Listed(NamedTuple):
    """The key blocks that each query block sees.

    lists, counts  int32 [B|1,H|1,n,K] and [B|1,H|1,n], any strides; None where `every` is n
    every          so many first query blocks see every key place before `used`, and have no list
    used           places of keys
    """

    lists: torch.Tensor | None
    counts: torch.Tensor | None
    used: int
    every: int = 0


class Coarse(NamedTuple):
    """What is added to the output: gate [B,S,H,V] times values [B,H,n,V] (float32) of the query row's block."""

    gate: torch.Tensor
    values: torch.Tensor


def listed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    queries: Blocks,
    keys: Blocks,
    listed: Listed,
    tile: VideoTile,
    *,
    scale: float,
    coarse: Coarse | None = None,
) -> None:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,V] -> out [B,Sq,H,V] (last axis dense), lse float32 [B,H,Sq].

    Keys in an order of their own are packed first where the tile says so: that takes as much memory as k and v.
    """
    samples, _, heads, head_dim = q.shape
    v_dim, group = v.shape[3], heads // max(k.shape[2], 1)
    if min(samples, heads, queries.number) == 0:
        return
    q, k, v = (last_axis_dense(tensor) for tensor in (q, k, v))
    gate = None if coarse is None else last_axis_dense(coarse.gate)
    described: tuple[Any, ...] = (None, None)
    key_order = keys.order
    if tile.packed and key_order is not None and k.numel() > 0:
        k, v = in_order(k, v, key_order, listed.used, listed.used)
        described = tuple(
            _described(rows, tile.block_n) if name in tile.described and _can_describe(rows) else None
            for name, rows in (("k", k), ("v", v))
        )
        k, v, key_order = k.transpose(1, 2), v.transpose(1, 2), None
    if listed.lists is None:
        steps, taken = queries.starts, queries.starts  # never read
        width, list_batch, list_head = 0, 0, 0
    else:
        steps, taken = steps_of(listed, keys, tile.block_n)
        width = steps.shape[3]
        list_batch, list_head = (
            0 if size == 1 else step for size, step in zip(taken.shape, rows_of(taken), strict=False)
        )
    strides = [stride for tensor in (q, k, v, out, gate) for stride in strides_of(tensor)]
    unit = unit_of(strides, q.element_size())
    if key_order is None:
        farthest = max(k.stride(1), v.stride(1)) * tile.block_n
    else:
        farthest = max(k.stride(1) * k.shape[1], v.stride(1) * v.shape[1])
    factors = score_factors(abs(scale) or 1.0, 0.0, q.element_size())
    rows = tile.block_m * (2 if tile.paired else 1)
    parts = max(1, -(-queries.largest // rows))
    launch(
        listed_kernel, (parts * queries.number * heads * samples,), q.device,
        q, k, v, out, lse, gate, None if coarse is None else coarse.values, *described, queries.order, key_order,
        queries.starts, queries.ends, steps, taken, *(stride // unit for stride in strides),
        *((0, 0) if lse is None else lse.stride()[:2]), list_batch, list_head, width, listed.every, listed.used,
        listed.used, queries.number, parts, heads, group, factors.outer,
        D=head_dim, V=v_dim, BLOCK_D=max(16, power_of_two(head_dim)), BLOCK_V=max(16, power_of_two(v_dim)),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, UNIT=unit, WIDE=farthest + 512 >= _INT32,
        SIGN=sign_of(scale), EVERY=listed.every > 0, PAIRED=tile.paired,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=factors.fused,
    )  # fmt: skip


def in_order(
    k: torch.Tensor, v: torch.Tensor, order: torch.Tensor, used: int, lines: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of k and v [B,S,H,D] at each place, head by head: [B,H,lines,D], zeros from `used` on."""
    samples, _, heads, head_dim = k.shape
    v_dim = v.shape[3]
    k_packed, v_packed = (tensor.new_empty(samples, heads, lines, tensor.shape[3]) for tensor in (k, v))
    strides = [*strides_of(k), *strides_of(v)]
    unit, tiles = unit_of(strides, k.element_size()), -(-lines // PACK_ROWS)
    launch(
        in_order_kernel, (tiles * heads * samples,), k.device,
        k, v, k_packed, v_packed, order, *(stride // unit for stride in strides), used, lines, tiles, heads,
        D=head_dim, V=v_dim, BLOCK_D=power_of_two(head_dim), BLOCK_V=power_of_two(v_dim), ROWS=PACK_ROWS, UNIT=unit,
        num_warps=MOVE_WARPS,
    )  # fmt: skip
    return k_packed, v_packed


def sign_of(scale: float) -> float:
    """Scores are made of q times this, so that the factor behind the row's maximum is positive."""
    return 0.0 if scale == 0.0 else 1.0 if scale > 0.0 else -1.0


def steps_of(listed: Listed, keys: Blocks, block_n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps int32 [B|1,H|1,n,width] and how many there are of each kind [B|1,H|1,n,2], for `listed_kernel`."""
    lists, counts = listed.lists, listed.counts
    assert lists is not None
    assert counts is not None
    if listed.used * block_n >= _INT32:
        raise ValueError(f"keys: at most {_INT32 // block_n} places are served, got {listed.used}")
    samples, heads, blocks, entries = lists.shape
    most = max(1, -(-keys.largest // block_n))
    width = entries * most
    steps = torch.empty(samples, heads, blocks, width, dtype=torch.int32, device=lists.device)
    taken = torch.empty(samples, heads, blocks, 2, dtype=torch.int32, device=lists.device)
    launch(
        steps_kernel, (samples * heads * blocks,), lists.device,
        lists, counts, keys.starts, keys.ends, steps, taken, *lists.stride(), *counts.stride(),
        width, keys.number, listed.used, entries, most, listed.every, blocks, heads,
        BLOCK_N=block_n, CHUNK=min(STEPS_CHUNK, max(16, power_of_two(entries))), num_warps=1,
    )  # fmt: skip
    return steps, taken


def rows_of(taken: torch.Tensor) -> tuple[int, int]:
    """Query blocks of one sample, and of one head."""
    _, heads, blocks, _ = taken.shape
    return heads * blocks, blocks


def _can_describe(rows: torch.Tensor) -> bool:
    """Whether hardware can take rows [B,H,S,D] of this size by a descriptor."""
    lines = rows.numel() // rows.shape[3]
    return rows.shape[3] * rows.element_size() % _VECTOR == 0 and lines < _INT32


def _described(rows: torch.Tensor, block_n: int) -> TensorDescriptor:
    width = rows.shape[3]
    block = [block_n, max(16, power_of_two(width))]
    return TensorDescriptor(rows, [rows.numel() // width, width], [width, 1], block)


def strides_of(tensor: torch.Tensor | None) -> tuple[int, int, int]:
    """Those of [B,S,H,D] but for the last, with 0 along an axis of one element."""
    if tensor is None:
        return 0, 0, 0
    batch, row, head = (0 if size == 1 else step for size, step in zip(tensor.shape[:3], tensor.stride(), strict=False))
    return batch, row, head


def unit_of(strides: list[int], element_size: int) -> int:
    """A power of two that all strides are multiples of, so that the compiler knows it of the addresses."""
    common = gcd(*strides)
    return min(common & -common or _VECTOR, _VECTOR // element_size)


def last_axis_dense(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor [B,S,H,D], or a copy of it whose last axis is."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()
