"""Kernels around the lists of blocks: lists into steps of the fine kernel, and keys and values into tile order."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=(
        "list_batch",
        "list_head",
        "count_batch",
        "count_head",
        "list_row",
        "list_entry",
        "count_row",
        "width",
        "key_blocks",
        "limit",
        "entries",
        "most",
        "every",
        "blocks",
        "heads",
    ),
    do_not_specialize_on_alignment=("lists", "counts", "starts", "ends", "steps", "taken"),
)
def steps_kernel(
    lists, counts, starts, ends, steps, taken,
    list_batch, list_head, list_row, list_entry, count_batch, count_head, count_row,
    width, key_blocks, limit, entries, most, every, blocks, heads,
    BLOCK_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The list of one query block a program -> its steps, as `listed_kernel` takes them; the first `every` have none.

    `starts`, `ends`: places of each of `key_blocks`; no place from `limit` on is taken, no block that is not there, no
    entry past `entries`. `most`: steps of the largest block.
    """
    program = tl.program_id(0)
    block = program % blocks
    if block < every:
        return
    head = (program // blocks % heads).to(tl.int64)
    sample = (program // blocks // heads).to(tl.int64)
    lists += sample * list_batch + head * list_head + block.to(tl.int64) * list_row
    count = tl.load(counts + (sample * count_batch + head * count_head + block.to(tl.int64) * count_row))
    count = tl.minimum(count, entries)
    steps += program.to(tl.int64) * width
    whole = 0
    some = 0
    for chunk in range(0, count, CHUNK):
        place = chunk + tl.arange(0, CHUNK)
        listed = place < count
        key_block = tl.load(lists + place.to(tl.int64) * list_entry, mask=listed, other=-1).to(tl.int32)
        there = (key_block >= 0) & (key_block < key_blocks)
        start = tl.load(starts + key_block, mask=there, other=0)
        end = tl.minimum(tl.load(ends + key_block, mask=there, other=0), limit)
        size = tl.maximum(end - start, 0)
        steps_here = tl.minimum(size // BLOCK_N, most)
        left = size - steps_here * BLOCK_N
        left = tl.where(steps_here == most, 0, left)
        behind = whole + tl.cumsum(steps_here, 0)
        at = behind - steps_here
        for step in range(most):
            tl.store(steps + at + step, start + step * BLOCK_N, mask=step < steps_here)
        partial = (left > 0).to(tl.int32)
        taken_before = some + tl.cumsum(partial, 0) - partial
        code = (start + steps_here * BLOCK_N) * BLOCK_N + left - 1
        tl.store(steps + (width - 1 - taken_before), code, mask=left > 0)
        whole += tl.sum(steps_here, 0)
        some += tl.sum(partial, 0)
    taken += program.to(tl.int64) * 2
    tl.store(taken, whole)
    tl.store(taken + 1, some)


@triton.jit
def _moved(
    source, target, order, first, used, lines, sample, head, heads, batch, row, head_step,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    places = first + tl.arange(0, ROWS)
    there = places < used
    columns = tl.arange(0, WIDTH)
    inside = (columns < SIZE)[None, :]
    rows = tl.load(order + places, mask=there, other=0).to(tl.int64)
    source += (sample * batch + head * head_step.to(tl.int64)) * UNIT
    source += (rows * (row.to(tl.int64) * UNIT))[:, None] + columns[None, :]
    values = tl.load(source, mask=there[:, None] & inside, other=0.0)
    target += (sample * heads + head) * lines * SIZE
    target += (places.to(tl.int64) * SIZE)[:, None] + columns[None, :]
    tl.store(target, values, mask=(places < lines)[:, None] & inside)


@triton.jit(
    do_not_specialize=("k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head", "used", "lines", "tiles", "heads"),
    do_not_specialize_on_alignment=("order",),
)
def in_order_kernel(
    k, v, k_packed, v_packed, order, k_batch, k_row, k_head, v_batch, v_row, v_head, used, lines, tiles, heads,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Rows of k and v [B,S,H,D] in tile order, zeros from `used` on: [B,H,lines,D]. ROWS places of a head a program.

    Strides count UNIT elements.
    """
    program = tl.program_id(0)
    first = program % tiles * ROWS
    head = program // tiles % heads
    sample = (program // tiles // heads).to(tl.int64)
    _moved(k, k_packed, order, first, used, lines, sample, head, heads, k_batch, k_row, k_head, D, BLOCK_D, ROWS, UNIT)
    _moved(v, v_packed, order, first, used, lines, sample, head, heads, v_batch, v_row, v_head, V, BLOCK_V, ROWS, UNIT)
