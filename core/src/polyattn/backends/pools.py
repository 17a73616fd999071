"""Pools of pages as kernels take them: their layout, a table that stays in them, the rows that are read."""

from __future__ import annotations

import torch

from polyattn.door.request import TensorFacts
from polyattn.structures.paged import PagedMeta


def row_major(pool: TensorFacts) -> bool:
    """Whether a pool is contiguous: a kernel that takes no strides would get a copy of all of another."""
    return pool.stride == TensorFacts.contiguous(pool.shape, pool.dtype).stride or 0 in pool.shape


def table_within(meta: PagedMeta, pages: int) -> torch.Tensor:
    """The table with every entry in a pool of so many pages: those past a row's length may name any page."""
    return meta.block_table.clamp(0, pages - 1).contiguous()


def rows_read(meta: PagedMeta, page_size: int) -> torch.Tensor:
    """Slots of the pool, int64 [sum of kv_lengths] on the device: the rows that are read, row after row.

    The host must know the table and the lengths.
    """
    assert meta.host_table is not None
    assert meta.host_kv is not None
    offsets = torch.arange(page_size, device="cpu")
    rows = [
        (torch.tensor(table[: -(-length // page_size)], device="cpu")[:, None] * page_size + offsets).flatten()[:length]
        for table, length in zip(meta.host_table, meta.host_kv, strict=True)
        if length > 0
    ]
    index = torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device="cpu")
    return index.to(meta.block_table.device)
