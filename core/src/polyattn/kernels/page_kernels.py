"""The Triton kernel that writes rows into the pages of a cache, keys and values in one launch."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

_NUMBERS = (
    "slots_step", "rows", "slot_count", "k_token", "k_head", "k_page", "k_slot", "k_page_head",
    "v_token", "v_head", "v_page", "v_slot", "v_page_head",
)  # fmt: skip


@triton.jit
def _columns(column, head, STEP: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, DENSE: tl.constexpr):
    """Where a column of the H*D ones of a row lies in it; DENSE: all lie side by side."""
    if DENSE:
        return column.to(tl.int64)
    else:
        return (column // DIM).to(tl.int64) * head + (column % DIM).to(tl.int64) * STEP


@triton.jit
def _write(
    slots, slots_step, rows, slot_count, block, chunk, source, pool, token, head, page, slot, page_head,
    WIDTH: tl.constexpr, DIM: tl.constexpr, STEP: tl.constexpr, POOL_STEP: tl.constexpr, DENSE: tl.constexpr,
    POOL_DENSE: tl.constexpr, PAGE: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    row = block * (TILE // COLUMNS) + tl.arange(0, TILE // COLUMNS)
    column = chunk * COLUMNS + tl.arange(0, COLUMNS)
    target = tl.load(slots + row * slots_step, mask=row < rows, other=-1).to(tl.int64)
    kept = (target >= 0) & (target < slot_count)
    target = tl.where(kept, target, 0)
    start = row.to(tl.int64) * token * UNIT
    place = (target // PAGE * page + target % PAGE * slot) * UNIT
    mask = kept[:, None] & (column < WIDTH)[None, :]
    columns = _columns(column, head.to(tl.int64) * UNIT, STEP, WIDTH, DIM, DENSE)
    values = tl.load(source + start[:, None] + columns[None, :], mask=mask)
    columns = _columns(column, page_head.to(tl.int64) * UNIT, POOL_STEP, WIDTH, DIM, POOL_DENSE)
    tl.store(pool + place[:, None] + columns[None, :], values, mask=mask)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=("slots",))
def write_rows_kernel(
    slots, k, v, k_pool, v_pool, slots_step, rows, slot_count,
    k_token, k_head, k_page, k_slot, k_page_head, v_token, v_head, v_page, v_slot, v_page_head,
    K_WIDTH: tl.constexpr, K_DIM: tl.constexpr, K_STEP: tl.constexpr, K_POOL_STEP: tl.constexpr,
    K_DENSE: tl.constexpr, K_POOL_DENSE: tl.constexpr, K_COLUMNS: tl.constexpr,
    V_WIDTH: tl.constexpr, V_DIM: tl.constexpr, V_STEP: tl.constexpr, V_POOL_STEP: tl.constexpr,
    V_DENSE: tl.constexpr, V_POOL_DENSE: tl.constexpr, V_COLUMNS: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Row i of k and v to slot slots[i] of the pools, unless that is outside [0, slot_count).

    One axis of programs, those of k first. Strides count UNIT elements; slots are counted in 64 bits.
    """
    number = tl.program_id(0)
    K_CHUNKS: tl.constexpr = (K_WIDTH + K_COLUMNS - 1) // K_COLUMNS
    V_CHUNKS: tl.constexpr = (V_WIDTH + V_COLUMNS - 1) // V_COLUMNS
    K_ROWS: tl.constexpr = TILE // K_COLUMNS
    programs = (rows + (K_ROWS - 1)) // K_ROWS * K_CHUNKS
    if number < programs:
        _write(
            slots, slots_step, rows, slot_count, number // K_CHUNKS, number % K_CHUNKS, k, k_pool,
            k_token, k_head, k_page, k_slot, k_page_head,
            K_WIDTH, K_DIM, K_STEP, K_POOL_STEP, K_DENSE, K_POOL_DENSE, PAGE, K_COLUMNS, TILE, UNIT,
        )  # fmt: skip
    else:
        number -= programs
        _write(
            slots, slots_step, rows, slot_count, number // V_CHUNKS, number % V_CHUNKS, v, v_pool,
            v_token, v_head, v_page, v_slot, v_page_head,
            V_WIDTH, V_DIM, V_STEP, V_POOL_STEP, V_DENSE, V_POOL_DENSE, PAGE, V_COLUMNS, TILE, UNIT,
        )  # fmt: skip
