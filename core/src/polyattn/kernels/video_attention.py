"""Video sparse attention from raster rows to raster rows: O = fine + gate * coarse, and block maps by the same kernels.

Heads are taken a few at a time, so that what is kept beside the output stays small. Forward only; float16, bfloat16 and
float32; any head dims up to 256.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from polyattn.backends.calls import Result
from polyattn.kernels.launch import architecture_of
from polyattn.kernels.video_fine import Blocks, Coarse, Listed, listed_attention
from polyattn.kernels.video_select import select
from polyattn.kernels.video_tiles import PACKED_BYTES, PACKED_SHARE, HopperTile, VideoTile, hopper_tile, video_tile


class Tiling(NamedTuple):
    """A sequence cut into blocks, on the device.

    order    int32 [used] or longer: the tensor's row of each place, block after block
    starts   int32 [n+1]: the first place of each block
    prefix   so many first blocks are dense rows and always-kept columns
    kept     blocks kept of the others, at least one where there are any
    largest  the most rows of one block
    used     places, which hold the tensor's first rows; later rows become 0, their LSE -inf
    """

    order: torch.Tensor
    starts: torch.Tensor
    prefix: int
    kept: int
    largest: int
    used: int


def video_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    tiling: Tiling,
    *,
    scale: float,
    gate: torch.Tensor | None = None,
    need_lse: bool = False,
    tile: VideoTile | HopperTile | None = None,
    heads_at_once: int | None = None,
) -> Result:
    """q [B,S,H,D], k [B,S,Hk,D], v [B,S,Hk,V], gate [B,S,H,V] or None -> out [B,S,H,V], lse float32 [B,H,S] or None.

    The LSE is the fine branch's. `tile`, `heads_at_once` (KV heads): how to cut the work, else the tables decide.
    """
    samples, rows, heads, _ = q.shape
    kv_heads = v.shape[2]
    result, lse = _results(q, v, out, need_lse)
    if tile is None:
        tile = _tile_of(q, v, tiling)
    fine: Any = listed_attention if isinstance(tile, VideoTile) else _hopper()
    starts = tiling.starts
    number = starts.shape[0] - 1
    blocks = Blocks(starts.narrow(0, 0, number), starts.narrow(0, 1, number), tiling.largest, tiling.order)
    used = tiling.used
    group = heads // max(kv_heads, 1)
    size = heads_at_once or most_heads(q, k, v, used)
    for first in range(0, kv_heads if samples and used else 0, size):
        some = min(size, kv_heads - first)
        k_part, v_part = (x.narrow(2, first, some) for x in (k, v))
        mine = (first * group, some * group)
        q_part = q.narrow(2, *mine)
        chosen = select(
            q_part, k_part, v_part if gate is not None else None, tiling.order, starts,
            prefix=tiling.prefix, kept=tiling.kept, scale=scale,
        )  # fmt: skip
        every = blocks.number if chosen.lists is None else tiling.prefix
        coarse = None
        if gate is not None:
            assert chosen.coarse is not None
            coarse = Coarse(gate.narrow(2, *mine), chosen.coarse)
        fine(
            q_part, k_part, v_part, result.narrow(2, *mine), None if lse is None else lse.narrow(1, *mine),
            blocks, blocks, Listed(chosen.lists, chosen.counts, used, every), tile, scale=scale, coarse=coarse,
        )  # fmt: skip
    if rows > used:
        result.narrow(1, used, rows - used).zero_()
        if lse is not None:
            lse.narrow(2, used, rows - used).fill_(float("-inf"))
    return (result if out is None or result is out else out.copy_(result)), lse


def block_map_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    queries: Blocks,
    keys: Blocks,
    listed: Listed,
    *,
    scale: float,
    need_lse: bool = False,
    tile: VideoTile | None = None,
) -> Result:
    """As `listed_attention`, of blocks that together hold every query row."""
    result, lse = _results(q, v, out, need_lse)
    if tile is None:
        arch = architecture_of(q.device)
        tile = video_tile(arch, q.shape[3], v.shape[3], q.element_size(), queries.largest, keys.largest)
    listed_attention(q, k, v, result, lse, queries, keys, listed, tile, scale=scale)
    return (result if out is None or result is out else out.copy_(result)), lse


def _tile_of(q: torch.Tensor, v: torch.Tensor, tiling: Tiling) -> VideoTile | HopperTile:
    arch, head_dim, v_dim, size = architecture_of(q.device), q.shape[3], v.shape[3], q.element_size()
    if _has_gluon():
        lines = v.shape[0] * v.shape[2] * (tiling.used + 128)  # as many as could be packed at once
        tile = hopper_tile(arch, head_dim, v_dim, size, tiling.largest, lines)
        if tile is not None:
            return tile
    return video_tile(arch, head_dim, v_dim, size, tiling.largest, tiling.largest)


@cache
def _has_gluon() -> bool:
    """Whether this Triton compiles the kernel for Hopper."""
    return tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 6)


def _hopper() -> Any:
    from polyattn.kernels.video_hopper import listed_attention_hopper

    return listed_attention_hopper


def _results(q: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, need_lse: bool) -> Result:
    samples, rows, heads, _ = q.shape
    fits = out is not None and (out.stride(3) == 1 or out.shape[3] == 1)
    result = out if out is not None and fits else q.new_empty(samples, rows, heads, v.shape[3])
    lse = torch.empty(samples, heads, rows, dtype=torch.float32, device=q.device) if need_lse else None
    return result, lse


def most_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: int) -> int:
    """KV heads of one pass, about as many in each."""
    kv_heads = max(1, k.shape[2])
    one = max(1, q.shape[0] * used * (k.shape[3] + v.shape[3]) * q.element_size())
    whole = (q.numel() + k.numel() + v.numel()) * q.element_size()
    most = max(1, int(max(PACKED_SHARE * whole, PACKED_BYTES)) // one)
    passes = -(-kv_heads // most)
    return -(-kv_heads // passes)
