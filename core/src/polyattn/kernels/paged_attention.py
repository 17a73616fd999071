"""Attention over paged keys and values, torch in and torch out: any page size, queries batched, padded or packed.

Forward only; float16, bfloat16 and float32; any head dims up to 512, each its own for keys and values. Every row of the
output is written, once. No length is read on the host: tables and lengths may change between replays of a graph.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import gcd
from typing import NamedTuple

import torch

from polyattn.backends.calls import Result
from polyattn.kernels.combine_kernel import combine_splits_kernel
from polyattn.kernels.launch import Prepared, architecture_of, launch_prepared, prepare
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
from polyattn.kernels.score_factors import score_factors

Window = tuple[int | None, int | None] | None

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
    result = q.new_empty(*q.shape[:-1], v.shape[-1]) if out is None else out
    table, q_lengths, ends = pages.block_table, pages.q_lengths, pages.ends
    plan = _plan(
        q.device, q.element_size(), _layout(q), _layout(k), _layout(v), _layout(result), _layout(table),
        pages.kv_lengths.stride(0), None if q_lengths is None else q_lengths.stride(0),
        None if ends is None else ends.shape[1], pages.max_q, _rounded(pages.max_k), causal, scale, window, softcap,
        tiles,
    )  # fmt: skip
    device, lse, part, part_lse = q.device, None, None, None
    if need_lse:
        lse = torch.empty(plan.lse_shape, dtype=torch.float32, device=device)
    if plan.combining is not None:
        part = torch.empty(plan.part_shape, dtype=torch.float32, device=device)
        part_lse = torch.empty(plan.part_shape[:-1], dtype=torch.float32, device=device)
    launch_prepared(
        plan.attention, plan.grid, device,
        q, k, v, result, lse, part, part_lse, table, pages.kv_lengths, q_lengths,
        None if ends is None else ends.contiguous(),
    )  # fmt: skip
    if plan.combining is not None:
        launch_prepared(plan.combining, plan.combining_grid, device, part, part_lse, result, lse)
    return result, lse


class _Plan(NamedTuple):
    """The launches but for their tensors, and the shapes of what they write beside the output."""

    attention: Prepared
    grid: tuple[int, ...]
    combining: Prepared | None
    combining_grid: tuple[int, ...]
    lse_shape: tuple[int, ...]
    part_shape: tuple[int, ...]


_Layout = tuple[torch.Size, tuple[int, ...]]


def _layout(tensor: torch.Tensor) -> _Layout:
    return tensor.shape, tensor.stride()


def _rounded(most: int | None) -> int | None:
    """A bound that stays the same while a row grows by a few keys."""
    return None if most is None else -(-most // 256) * 256


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device,
    itemsize: int,
    q: _Layout,
    k: _Layout,
    v: _Layout,
    out: _Layout,
    table: _Layout,
    kv_lengths_step: int,
    q_lengths_step: int | None,
    ends_width: int | None,
    max_q: int | None,
    max_k: int | None,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    tiles: PagedTiles | None,
) -> _Plan:
    packed = len(q[0]) == 3
    (batch, max_pages), (tokens, heads, dim) = table[0], q[0][-3:]
    page_count, page_size, kv_heads, v_dim = v[0]
    group = heads // kv_heads
    if tiles is None:
        tiles = _tiles(device, itemsize, q[0], v[0], (batch, max_pages), max_q, max_k, causal, window)
    splits, rows, block_v = tiles.splits, tiles.block_m, max(16, power_of_two(v_dim))
    all_tokens = tokens if packed else batch * tokens
    tiles_a_row = -(-tokens * group // rows)
    # packed rows share the tokens; beside their whole tiles each, and the tokens behind them, begins one more
    row_tiles = (tokens * group + (batch + 1) * (rows - 1)) // rows if packed else batch * tiles_a_row
    strides = [*_strides(q), *_strides(k), *_strides(v), *_strides(out)]
    common = gcd(*strides)
    unit = min(common & -common or 16, 16)
    strides = [stride // unit for stride in strides]
    left, right = (None, None) if window is None else window
    if causal:
        right = None
    inner, outer, capped, fused = score_factors(abs(scale), softcap, itemsize)
    attention = prepare(
        paged_attention_kernel,
        *strides, *table[1], kv_lengths_step, q_lengths_step or 0,
        batch, tokens, tiles_a_row, max_pages, page_count, min(left or 0, _FAR), min(right or 0, _FAR), ends_width or 0,
        inner if capped else outer, outer,
        GROUP=group, DIM=dim, V_DIM=v_dim, PAGE=page_size, UNIT=unit,
        Q_STEP=_step(q), K_STEP=_step(k), V_STEP=_step(v), OUT_STEP=_step(out),
        PACKED=packed, CAUSAL=causal, LEFT=left is not None, RIGHT=right is not None, CAPPED=capped,
        NEGATIVE=scale < 0.0, ALIKE=strides[3:5] == strides[6:8], WIDE=max(_extent(k), _extent(v)) >= 1 << 31,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=max(16, power_of_two(dim)), BLOCK_V=block_v,
        num_warps=tiles.warps, num_stages=tiles.stages, enable_fp_fusion=fused,
    )  # fmt: skip
    combining, block_r = None, max(1, COMBINED // block_v)
    if splits > 1:
        combining = prepare(
            combine_splits_kernel, splits, all_tokens, tokens, heads, *strides[-3:],
            V_DIM=v_dim, UNIT=unit, OUT_STEP=_step(out), BLOCK_R=block_r, BLOCK_V=block_v, AHEAD=COMBINE_AHEAD,
            num_warps=COMBINE_WARPS,
        )  # fmt: skip
    return _Plan(
        attention, (row_tiles, kv_heads, splits), combining, (-(-all_tokens * heads // block_r),),
        (heads, tokens) if packed else (batch, heads, tokens), (splits, all_tokens, heads, v_dim),
    )  # fmt: skip


def _strides(layout: _Layout) -> tuple[int, ...]:
    """The first three of four strides, [T,H,D] being one sample; 0 along axes of one element."""
    strides = tuple(stride if size > 1 else 0 for size, stride in zip(*layout, strict=True))
    return strides[:-1] if len(strides) == 4 else (0, *strides[:-1])


def _step(layout: _Layout) -> int:
    """The stride of the last axis."""
    return layout[1][-1] if layout[0][-1] > 1 else 1


def _extent(layout: _Layout) -> int:
    """Elements from the first to the last one, in memory."""
    return sum((size - 1) * stride for size, stride in zip(*layout, strict=True))


def _tiles(
    device: torch.device,
    itemsize: int,
    q_shape: torch.Size,
    v_shape: torch.Size,
    table_shape: tuple[int, int],
    max_q: int | None,
    max_k: int | None,
    causal: bool,
    window: Window,
) -> PagedTiles:
    rows, entries = table_shape
    _, page_size, kv_heads, v_dim = v_shape
    queries, heads, dim = q_shape[-3:]
    if max_q is not None:
        queries = min(queries, max_q)
    elif len(q_shape) == 3:  # the tokens of all rows: an even share each, as nothing else is known
        queries = -(-queries // max(rows, 1))
    keys = entries * page_size if max_k is None else min(max_k, entries * page_size)
    if window is not None and window[0] is not None and (causal or window[1] is not None):
        keys = min(keys, window[0] + (0 if causal else window[1] or 0) + queries)
    group = heads // kv_heads
    work = Work(max(1, queries * group), max(1, keys), rows * kv_heads, max(dim, v_dim), itemsize)
    return paged_tiles(work, architecture_of(device), _multiprocessors(device))


@cache
def _multiprocessors(device: torch.device) -> int:
    """Multiprocessors (compute units, Xe cores) of a device; 1 under the interpreter, and for fake tensors."""
    module = None if device.type in ("cpu", "meta") else torch.get_device_module(device)
    if module is None or not module.is_available():
        return 1
    properties = module.get_device_properties(device)
    names = ("multi_processor_count", "gpu_subslice_count", "max_compute_units")
    return next((int(count) for name in names if (count := getattr(properties, name, 0))), 64)
