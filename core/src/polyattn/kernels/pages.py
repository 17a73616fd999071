"""Writing rows into the pages of a cache: keys and values in one launch, every byte moved once."""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import torch

from polyattn.kernels import row_tiles
from polyattn.kernels.launch import Prepared, launch_prepared, prepare
from polyattn.kernels.page_kernels import write_rows_kernel

#: The largest number of elements by which strides are counted: 16 bytes and more of any dtype.
_UNIT = 16


def write_rows(
    k_pool: torch.Tensor, v_pool: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> None:
    """Row i of k [T,Hk,D] and v [T,Hk,Dv] to slot `slots[i]` of [pages,page_size,Hk,D] and [pages,page_size,Hk,Dv].

    `slots` [T], int64 or int32, on the device of the rest: page * page_size + offset. Those that are negative or past
    the pool are skipped. A slot that is named twice is left with parts of either row. Any strides, one dtype.
    """
    rows = slots.shape[0]
    if rows == 0:
        return
    writing, programs = _plan(
        k.element_size(), rows, slots.stride(0), *((tensor.shape, tensor.stride()) for tensor in (k, k_pool, v, v_pool))
    )
    launch_prepared(writing, (programs,), k.device, slots, k, v, k_pool, v_pool)


_Layout = tuple[torch.Size, tuple[int, ...]]


@lru_cache(maxsize=1024)
def _plan(
    itemsize: int, rows: int, slots_step: int, k: _Layout, k_pool: _Layout, v: _Layout, v_pool: _Layout
) -> tuple[Prepared, int]:
    """The launch but for its tensors, and its programs."""
    tile = row_tiles.tile_of(itemsize)
    strides = [*_strides(k), *_strides(k_pool), *_strides(v), *_strides(v_pool)]
    common = gcd(*strides)
    unit = min(common & -common or _UNIT, _UNIT)
    strides = [stride // unit for stride in strides]
    constants: dict[str, Any] = {}
    programs = 0
    for name, given, pool in (("K", k, k_pool), ("V", v, v_pool)):
        heads, dim = given[0][1:]
        columns = row_tiles.columns(heads * dim, tile)
        programs += -(-rows // (tile // columns)) * -(-heads * dim // columns)
        constants |= {
            f"{name}_WIDTH": heads * dim, f"{name}_DIM": dim, f"{name}_COLUMNS": columns,
            f"{name}_STEP": given[1][2], f"{name}_POOL_STEP": pool[1][3],
            f"{name}_DENSE": _dense(given), f"{name}_POOL_DENSE": _dense(pool),
        }  # fmt: skip
    pages, page_size = k_pool[0][:2]
    writing = prepare(
        write_rows_kernel, slots_step, rows, pages * page_size, *strides,
        PAGE=page_size, TILE=tile, UNIT=unit, num_warps=row_tiles.WARPS, **constants,
    )  # fmt: skip
    return writing, programs


def _strides(layout: _Layout) -> tuple[int, ...]:
    """All strides but the last; 0 along axes of one element."""
    shape, strides = layout
    return tuple(stride if size > 1 else 0 for stride, size in zip(strides[:-1], shape[:-1], strict=True))


def _dense(layout: _Layout) -> bool:
    """Whether the last two axes lie side by side."""
    (heads, dim), (step, column) = layout[0][-2:], layout[1][-2:]
    return (dim == 1 or column == 1) and (heads == 1 or step == dim)
