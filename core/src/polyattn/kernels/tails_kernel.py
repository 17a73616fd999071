"""Triton kernel that looks for NaN and infinity behind the ends of documents."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=("rows", "reach", "ends_stride"),
    do_not_specialize_on_alignment=("ends", "flags"),
)
def tails_kernel(
    v, ends, flags, batch_stride, row_stride, head_stride, dim_stride, ends_stride, rows, reach,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """flags[d] becomes 1 where rows [ends[d], ends[d] + reach) of v, below `rows`, are not all finite.

    A program looks at ROWS of these rows; the documents lie batch_stride apart, 0 where they share one axis of rows.
    """
    document = tl.program_id(0)
    end = tl.load(ends + document.to(tl.int64) * ends_stride)
    row = end + tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    last = tl.minimum(end + reach, rows)
    inside = (row >= 0) & (row < last)
    if end + tl.program_id(1) * ROWS < last:
        start = v + document.to(tl.int64) * batch_stride + row.to(tl.int64) * row_stride
        strange = tl.zeros([ROWS, COLUMNS], dtype=tl.int32)
        for first in range(0, HEADS * DIM, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            place = (column // DIM).to(tl.int64) * head_stride + (column % DIM).to(tl.int64) * dim_stride
            mask = inside[:, None] & (column < HEADS * DIM)[None, :]
            value = tl.load(start[:, None] + place[None, :], mask=mask, other=0.0).to(tl.float32)
            strange |= ((value != value) | (tl.abs(value) == float("inf"))).to(tl.int32)
        if tl.max(tl.max(strange, axis=1), axis=0) > 0:
            tl.atomic_max(flags + document, 1)
