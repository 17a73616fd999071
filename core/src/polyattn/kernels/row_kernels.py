"""Triton kernels that move rows: tiles of several rows by a part of their columns, every byte read and written once.

Heads and the head dimension are one axis of columns where they lie side by side (SEGMENT == WIDTH == H*D); else a
column is cut into its head and its place in it. Rows are counted in 32 bits, offsets in 64.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _row_offset(row, length, batch_stride, row_stride):
    """Where row b*length + s of a [B,S,...] tensor begins."""
    batch = row // length
    return batch.to(tl.int64) * batch_stride + (row - batch * length).to(tl.int64) * row_stride


@triton.jit
def _column_offset(column, head_stride, dim_stride, WIDTH: tl.constexpr, SEGMENT: tl.constexpr):
    """Where a column of the H*D ones of a row lies in it; SEGMENT of them lie side by side."""
    if SEGMENT == WIDTH:
        return column.to(tl.int64)
    return (column // SEGMENT).to(tl.int64) * head_stride + (column % SEGMENT).to(tl.int64) * dim_stride


@triton.jit
def _tiles(rows, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Tiles that cover `rows` rows."""
    return ((rows + TILE // COLUMNS - 1) // (TILE // COLUMNS)) * ((WIDTH + COLUMNS - 1) // COLUMNS)


@triton.jit
def _tile(number, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr):
    """Rows and columns of a tile; tiles of the same rows follow each other."""
    CHUNKS: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS
    block = number // CHUNKS
    row = block * (TILE // COLUMNS) + tl.arange(0, TILE // COLUMNS)
    return row, (number - block * CHUNKS) * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _pack_tile(
    number, index, kept, length, total, source, packed, batch_stride, row_stride, head_stride,
    WIDTH: tl.constexpr, SEGMENT: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Tile `number` of one tensor, if it has one of that number; how many it has."""
    tiles = _tiles(kept, WIDTH, COLUMNS, TILE)
    if (number >= 0) & (number < tiles):
        position, column = _tile(number, WIDTH, COLUMNS, TILE)
        live = position < kept
        row = tl.load(index + position, mask=live, other=-1)
        inside = (row >= 0) & (row < total)
        start = _row_offset(tl.where(inside, row, 0).to(tl.int32), length, batch_stride, row_stride)
        columns = _column_offset(column, head_stride, 1, WIDTH, SEGMENT)
        whole = (column < WIDTH)[None, :]
        value = tl.load(source + start[:, None] + columns[None, :], mask=inside[:, None] & whole, other=0)
        target = packed + position.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(target, value, mask=live[:, None] & whole)
    return tiles


@triton.jit(do_not_specialize=("kept", "length", "total"), do_not_specialize_on_alignment=("index",))
def pack_kernel(
    index, a, a_packed, b, b_packed, c, c_packed,
    kept, length, total, a_batch, a_row, a_head, b_batch, b_row, b_head, c_batch, c_row, c_head,
    A_WIDTH: tl.constexpr, A_SEGMENT: tl.constexpr, A_COLUMNS: tl.constexpr,
    B_WIDTH: tl.constexpr, B_SEGMENT: tl.constexpr, B_COLUMNS: tl.constexpr,
    C_WIDTH: tl.constexpr, C_SEGMENT: tl.constexpr, C_COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Rows index[i] (b*length + s) of up to three tensors to row i of theirs; rows outside of [0, total) become 0.

    The programs of tensor a come first, then those of b and c; an absent tensor is None.
    """
    number = tl.program_id(0)
    number -= _pack_tile(
        number, index, kept, length, total, a, a_packed, a_batch, a_row, a_head, A_WIDTH, A_SEGMENT, A_COLUMNS, TILE
    )
    if b is not None:
        number -= _pack_tile(
            number, index, kept, length, total, b, b_packed, b_batch, b_row, b_head, B_WIDTH, B_SEGMENT, B_COLUMNS, TILE
        )
    if c is not None:
        _pack_tile(
            number, index, kept, length, total, c, c_packed, c_batch, c_row, c_head, C_WIDTH, C_SEGMENT, C_COLUMNS, TILE
        )


@triton.jit
def _packed_row(place, row, total, kept):
    """The packed row of each padded one, -1 for none."""
    position = tl.load(place + row, mask=row < total, other=-1)
    return tl.where((position >= 0) & (position < kept), position, -1)


@triton.jit(do_not_specialize=("kept", "length", "total", "lse_head"), do_not_specialize_on_alignment=("place",))
def unpack_kernel(
    place, packed, out, lse, lse_out,
    kept, length, total, out_batch, out_row, out_head, lse_head,
    WIDTH: tl.constexpr, SEGMENT: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, LSE_ROWS: tl.constexpr,
):  # fmt: skip
    """Each of the `total` rows of `out` from the packed row that belongs there, else 0; `lse_out` likewise, else -inf.

    The programs of `out` come first. `place` is the inverse index [total].
    """
    number = tl.program_id(0)
    tiles = _tiles(total, WIDTH, COLUMNS, TILE)
    if number < tiles:
        row, column = _tile(number, WIDTH, COLUMNS, TILE)
        position = _packed_row(place, row, total, kept)
        whole = (column < WIDTH)[None, :]
        source = packed + position.to(tl.int64)[:, None] * WIDTH + column[None, :]
        value = tl.load(source, mask=(position >= 0)[:, None] & whole, other=0)
        start = _row_offset(row, length, out_batch, out_row)
        columns = _column_offset(column, out_head, 1, WIDTH, SEGMENT)
        tl.store(out + start[:, None] + columns[None, :], value, mask=(row < total)[:, None] & whole)
    elif lse is not None:
        _unpack_lse(number - tiles, place, kept, length, total, lse, lse_head, lse_out, HEADS, LSE_ROWS)


@triton.jit
def _unpack_lse(
    number, place, kept, length, total, lse, lse_head, lse_out,
    HEADS: tl.constexpr, LSE_ROWS: tl.constexpr,
):  # fmt: skip
    block = number // HEADS
    head = (number - block * HEADS).to(tl.int64)
    row = block * LSE_ROWS + tl.arange(0, LSE_ROWS)
    position = _packed_row(place, row, total, kept)
    value = tl.load(lse + head * lse_head + position, mask=position >= 0, other=float("-inf"))
    target = _row_offset(row, length, length.to(tl.int64) * HEADS, 1) + head * length
    tl.store(lse_out + target, value, mask=row < total)


@triton.jit(
    do_not_specialize=("length", "lse_batch", "lse_head"), do_not_specialize_on_alignment=("used",)
)  # fmt: skip
def clear_kernel(
    used, out, lse,
    used_stride, length, out_batch, out_row, out_head, out_dim, lse_batch, lse_head, lse_row,
    WIDTH: tl.constexpr, SEGMENT: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    HEADS: tl.constexpr, LSE_ROWS: tl.constexpr,
):  # fmt: skip
    """Rows from used[b] on of sample b (first axis of the grid) become 0, their LSE -inf; nothing else is touched."""
    batch = tl.program_id(0)
    first = tl.maximum(tl.load(used + batch * used_stride), 0).to(tl.int32)
    behind = length - first
    sample = out + batch.to(tl.int64) * out_batch
    for number in range(tl.program_id(1), _tiles(behind, WIDTH, COLUMNS, TILE), tl.num_programs(1)):
        row, column = _tile(number, WIDTH, COLUMNS, TILE)
        start = (first + row).to(tl.int64) * out_row
        columns = _column_offset(column, out_head, out_dim, WIDTH, SEGMENT)
        mask = (row < behind)[:, None] & (column < WIDTH)[None, :]
        tl.store(
            sample + start[:, None] + columns[None, :], tl.zeros(mask.shape, dtype=out.dtype.element_ty), mask=mask
        )
    if lse is not None:
        blocks = (behind + LSE_ROWS - 1) // LSE_ROWS * HEADS
        for number in range(tl.program_id(1), blocks, tl.num_programs(1)):
            block = number // HEADS
            row = block * LSE_ROWS + tl.arange(0, LSE_ROWS)
            start = batch.to(tl.int64) * lse_batch + (number - block * HEADS).to(tl.int64) * lse_head
            target = lse + start + (first + row).to(tl.int64) * lse_row
            tl.store(target, tl.full([LSE_ROWS], float("-inf"), tl.float32), mask=row < behind)


@triton.jit(do_not_specialize=("length", "lse_batch", "lse_head"), do_not_specialize_on_alignment=("keep",))
def blank_kernel(
    keep, out, lse,
    length, out_batch, out_row, out_head, out_dim, lse_batch, lse_head, lse_row,
    WIDTH: tl.constexpr, SEGMENT: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows s of sample b with keep[b*length + s] == 0 become 0, their LSE -inf.

    A program looks at ROWS rows of a sample; where all are kept, which is usual, it ends.
    """
    blocks = (length + (ROWS - 1)) // ROWS
    sample = tl.program_id(0) // blocks
    row = (tl.program_id(0) - sample * blocks) * ROWS + tl.arange(0, ROWS)
    batch = sample.to(tl.int64)
    hidden = (row < length) & (tl.load(keep + batch * length + row, mask=row < length, other=1) == 0)
    if tl.max(hidden.to(tl.int32), axis=0) > 0:
        start = batch * out_batch + row.to(tl.int64) * out_row
        for first in range(0, WIDTH, COLUMNS):
            column = first + tl.arange(0, COLUMNS)
            columns = _column_offset(column, out_head, out_dim, WIDTH, SEGMENT)
            mask = hidden[:, None] & (column < WIDTH)[None, :]
            tl.store(
                out + start[:, None] + columns[None, :], tl.zeros(mask.shape, dtype=out.dtype.element_ty), mask=mask
            )
        if lse is not None:
            for head in range(HEADS):
                target = lse + batch * lse_batch + head * lse_head + row.to(tl.int64) * lse_row
                tl.store(target, tl.full([ROWS], float("-inf"), tl.float32), mask=hidden)
