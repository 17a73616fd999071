"""Writing rows into the pages of a cache: keys and values in one launch, every byte moved once."""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from polyattn.kernels import row_tiles
from polyattn.kernels.launch import launch
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
    tile = row_tiles.tile_of(k.element_size())
    strides = [*_strides(k), *_strides(k_pool), *_strides(v), *_strides(v_pool)]
    common = gcd(*strides)
    unit = min(common & -common or _UNIT, _UNIT)
    strides = [stride // unit for stride in strides]
    constants: dict[str, Any] = {}
    programs = 0
    for name, given, pool in (("K", k, k_pool), ("V", v, v_pool)):
        heads, dim = given.shape[1:]
        columns = row_tiles.columns(heads * dim, tile)
        programs += -(-rows // (tile // columns)) * -(-heads * dim // columns)
        constants |= {
            f"{name}_WIDTH": heads * dim, f"{name}_DIM": dim, f"{name}_COLUMNS": columns,
            f"{name}_STEP": given.stride(2), f"{name}_POOL_STEP": pool.stride(3),
            f"{name}_DENSE": _dense(given), f"{name}_POOL_DENSE": _dense(pool),
        }  # fmt: skip
    launch(
        write_rows_kernel, (programs,), k.device,
        slots, k, v, k_pool, v_pool, slots.stride(0), rows, k_pool.shape[0] * k_pool.shape[1], *strides,
        PAGE=k_pool.shape[1], TILE=tile, UNIT=unit, num_warps=row_tiles.WARPS, **constants,
    )  # fmt: skip


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """All strides but the last; 0 along axes of one element."""
    return tuple(
        stride if size > 1 else 0 for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
    )


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the last two axes lie side by side."""
    heads, dim = tensor.shape[-2:]
    return (dim == 1 or tensor.stride(-1) == 1) and (heads == 1 or tensor.stride(-2) == dim)
