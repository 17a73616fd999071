"""Attention over paged keys and values, torch in and torch out: any page size, queries batched, padded or packed.

Forward only; float16, bfloat16 and float32; any head dims up to 512, each its own for keys and values. Every row of the
output is written, once. No length is read on the host: tables and lengths may change between replays of a graph.
"""

from __future__ import annotations

from functools import cache
from math import gcd
from typing import NamedTuple

import torch

from polyattn.backends.calls import Result
from polyattn.kernels.combine_kernel import combine_splits_kernel
from polyattn.kernels.launch import architecture_of, launch
from polyattn.kernels.paged_kernels import paged_attention_kernel
from polyattn.kernels.paged_tiles import (
    COMBINE_AHEAD,
    COMBINE_WARPS,
    COMBINED,
    PagedTiles,
    Work,
    paged_tiles,
    power_of_two,
)

Window = tuple[int | None, int | None] | None

_LOG2_E = 1.4426950408889634
#: Farther than any key: a window's side of this length hides nothing.
_FAR = 1 << 30


class Pages(NamedTuple):
    """Which keys a row has, on the device; integers are int32.

    block_table   [B, max_pages]: an entry outside [0, pages) hides its keys
    kv_lengths    [B]; a key past the table's end is hidden
    q_lengths     [B], or None: every query is asked. Packed queries need it
    ends          [B, width], or None: a query at position p sees keys before ends[p] (and causal and window hide more)
    max_q, max_k  bounds on the lengths where the host knows better ones than the shapes'; they decide speed alone
    """

    block_table: torch.Tensor
    kv_lengths: torch.Tensor
    q_lengths: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    max_q: int | None = None
    max_k: int | None = None


def paged_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    pages: Pages,
    *,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    tiles: PagedTiles | None = None,
) -> Result:
    """q [B,Sq,H,D] or packed [T,H,D], pools k [pages,page_size,Hk,D] and v [pages,page_size,Hk,Dv], any strides.

    -> out [B,Sq,H,Dv] or [T,H,Dv], lse float32 (natural log) [B,H,Sq] or [H,T], or None. The queries are the last
    positions of their row; causal and the window are aligned bottom-right. A query that sees no key, or lies past its
    row's q_lengths, gives 0 and LSE -inf. `tiles`: how to cut the work, else `paged_tiles` decides.
    """
    packed = q.dim() == 3
    batch, (tokens, heads, dim) = pages.block_table.shape[0], q.shape[-3:]
    page_size, kv_heads, v_dim = v.shape[1:]
    group = heads // kv_heads
    result = q.new_empty(*q.shape[:-1], v_dim) if out is None else out
    lse = None
    if need_lse:
        shape = (heads, tokens) if packed else (batch, heads, tokens)
        lse = torch.empty(shape, dtype=torch.float32, device=q.device)
    if tiles is None:
        tiles = _tiles(q, v, pages, causal, window, group)
    splits, block_m, block_v = tiles.splits, tiles.block_m, max(16, power_of_two(v_dim))
    all_tokens = tokens if packed else batch * tokens
    part = part_lse = None
    if splits > 1:
        part = torch.empty(splits, all_tokens, heads, v_dim, dtype=torch.float32, device=q.device)
        part_lse = torch.empty(splits, all_tokens, heads, dtype=torch.float32, device=q.device)

    tiles_a_row = -(-tokens * group // block_m)
    # packed rows share the tokens; beside their whole tiles each, and the tokens behind them, begins one more
    row_tiles = (tokens * group + (batch + 1) * (block_m - 1)) // block_m if packed else batch * tiles_a_row
    strides = [*_strides(q), *_strides(k), *_strides(v), *_strides(result)]
    common = gcd(*strides)
    unit = min(common & -common or 16, 16)
    strides = [stride // unit for stride in strides]
    left, right = (None, None) if window is None else window
    if causal:
        right = None
    table = pages.block_table
    q_lengths = pages.q_lengths
    launch(
        paged_attention_kernel, (row_tiles, kv_heads, splits), q.device,
        q, k, v, result, lse, part, part_lse, table, pages.kv_lengths, q_lengths, pages.ends,
        *strides, *table.stride(), pages.kv_lengths.stride(0), 0 if q_lengths is None else q_lengths.stride(0),
        batch, tokens, tiles_a_row, table.shape[1], k.shape[0], min(left or 0, _FAR), min(right or 0, _FAR),
        0 if pages.ends is None else pages.ends.shape[1],
        scale / softcap if softcap else scale * _LOG2_E, softcap * _LOG2_E,
        GROUP=group, DIM=dim, V_DIM=v_dim, PAGE=page_size, UNIT=unit,
        Q_STEP=_step(q), K_STEP=_step(k), V_STEP=_step(v), OUT_STEP=_step(result),
        PACKED=packed, CAUSAL=causal, LEFT=left is not None, RIGHT=right is not None, CAPPED=softcap > 0.0,
        BLOCK_M=block_m, BLOCK_N=tiles.block_n, BLOCK_D=max(16, power_of_two(dim)), BLOCK_V=block_v,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    if splits > 1:
        block_r = max(1, COMBINED // block_v)
        launch(
            combine_splits_kernel, (-(-all_tokens * heads // block_r),), q.device,
            part, part_lse, result, lse, splits, all_tokens, tokens, heads, *strides[-3:],
            V_DIM=v_dim, UNIT=unit, OUT_STEP=_step(result), BLOCK_R=block_r, BLOCK_V=block_v,
            AHEAD=COMBINE_AHEAD, num_warps=COMBINE_WARPS,
        )  # fmt: skip
    return result, lse


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The first three of four strides, [T,H,D] being one sample; 0 along axes of one element."""
    strides = tuple(stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return strides[:-1] if len(strides) == 4 else (0, *strides[:-1])


def _step(tensor: torch.Tensor) -> int:
    """The stride of the last axis."""
    return tensor.stride(-1) if tensor.shape[-1] > 1 else 1


def _tiles(q: torch.Tensor, v: torch.Tensor, pages: Pages, causal: bool, window: Window, group: int) -> PagedTiles:
    rows, entries = pages.block_table.shape
    page_size, kv_heads, v_dim = v.shape[1:]
    queries = q.shape[-3]
    if pages.max_q is not None:
        queries = min(queries, pages.max_q)
    elif q.dim() == 3:  # the tokens of all rows: an even share each, as nothing else is known
        queries = -(-queries // max(rows, 1))
    keys = entries * page_size if pages.max_k is None else min(pages.max_k, entries * page_size)
    if window is not None and window[0] is not None and (causal or window[1] is not None):
        keys = min(keys, window[0] + (0 if causal else window[1] or 0) + queries)
    work = Work(
        max(1, queries * group), max(1, keys), rows * kv_heads, max(q.shape[-1], v_dim), q.element_size(), page_size
    )
    return paged_tiles(work, architecture_of(q.device), _multiprocessors(q.device))


@cache
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors (compute units, Xe cores) of a device; 1 under the interpreter."""
    if device.type == "cpu":
        return 1
    properties = torch.get_device_module(device).get_device_properties(device)
    names = ("multi_processor_count", "gpu_subslice_count", "max_compute_units")
    return next((int(count) for name in names if (count := getattr(properties, name, 0))), 64)
