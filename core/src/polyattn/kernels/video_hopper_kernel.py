"""Exact attention of blocks of query rows over listed key blocks, forward, on Hopper: the kernel, in Gluon.

One warp copies keys and values into shared memory; groups of four warps have 64 query rows of one list each. A group
starts the products of a step's scores and those of the step before with its values, and takes in the new scores while
the latter run. `video_fine_kernel.py` says what is computed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from polyattn.kernels.video_hopper_parts import (
    INDICES,
    ROWS,
    RUNTIME,
    WIDTH,
    copy,
    gate_rows,
    hidden,
    item_of,
    output,
    queries_in,
    weighed,
)

#: Registers of a thread that copies, and of one of the second group: three groups of 128 threads have 504 together.
COPYING, ANSWERING = gl.constexpr(24), gl.constexpr(240)


@gluon.jit
def _copies(
    k_described, v_described, tiles, barriers, tables, list_batch, list_head, width, every, used, lines, blocks, parts,
    heads, group,
    GROUPS: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the copying warp does: keys of a step, then values of the step before, as they are asked for."""
    k_tiles, v_tiles = tiles[1], tiles[2]
    k_full, v_full, empty = barriers
    starts, ends, steps, taken = tables
    _block, head, sample, _start, _end, boxes, count = item_of(
        starts, ends, steps, taken, list_batch, list_head, width, every, used, blocks, parts, heads,
        GROUPS, EVERY, BOX, KEYS,
    )  # fmt: skip
    line = ((sample * (heads // group) + head // group) * lines).to(gl.int32)
    for step in range(count + 1):
        if step < count:
            # the keys' place is free with that of the keys so many steps before
            copy(k_described, k_tiles, k_full, empty, step, step, line, boxes, EVERY, BOX, KEYS, STAGES)
        if step > 0:
            # values are given back with the keys of the step behind them
            copy(v_described, v_tiles, v_full, empty, step - 1, step, line, boxes, EVERY, BOX, KEYS, STAGES)


@gluon.jit
def _step(
    acc, weights, total, peak, q_tile, tiles, barriers, boxes, step, outer,
    SOME: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Scores of a step; the values of the step before by its `weights` go into `acc` while these are taken in."""
    _, k_tiles, v_tiles = tiles
    k_full, v_full, empty = barriers
    slot = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(k_full.index(slot), step // STAGES & 1)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if SOME:
        scores = hidden(scores, boxes, step, EVERY, BOX, KEYS, SCORES)
    new, shrink, total, peak = weighed(scores, total, peak, outer, SOME)
    # here, not before their products: without a branch between them, ptxas waits for `acc` before it weighs the scores
    mbarrier.wait(v_full.index(slot), step // STAGES & 1)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    mbarrier.arrive(empty.index(slot), count=1)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
    return acc, gl.convert_layout(new.to(weights.dtype), gl.DotOperandLayout(0, ACC, 2)), total, peak


@gluon.jit
def _idle(barriers, count, STAGES: gl.constexpr):
    """What a group without rows owes the one that copies."""
    k_full, _, empty = barriers
    for step in range(count):
        slot = step % STAGES
        mbarrier.wait(k_full.index(slot), step // STAGES & 1)
        mbarrier.arrive(empty.index(slot), count=1)


@gluon.jit
def _answer(
    q, out, lse, gate, coarse, order, place, end, q_row, o_row, g_row, q_tile, tiles, barriers, boxes, count, outer,
    SIGN: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Rows [place, place + ROWS) of a block that ends at `end`, from their queries to their output."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    MOVED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    _, k_tiles, v_tiles = tiles
    k_full, v_full, empty = barriers
    live, rows = queries_in(q, order, place, end, q_row, q_tile, SIGN, MOVED)
    peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, WIDTH], gl.float32, ACC)
    mbarrier.wait(k_full.index(0), 0)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty.index(0), count=1)
    scores = hidden(scores, boxes, 0, EVERY, BOX, KEYS, SCORES)
    new, _shrink, total, peak = weighed(scores, total, peak, outer, True)
    weights = gl.convert_layout(new.to(q_tile.dtype), gl.DotOperandLayout(0, ACC, 2))
    mbarrier.wait(v_full.index(0), 0)
    seen = gl.maximum(boxes[2] // (KEYS // BOX), 1)  # so many first steps have no mask
    for step in range(1, seen):
        acc, weights, total, peak = _step(
            acc, weights, total, peak, q_tile, tiles, barriers, boxes, step, outer,
            False, EVERY, BOX, KEYS, STAGES, SCORES, ACC,
        )  # fmt: skip
    for step in range(seen, count):
        acc, weights, total, peak = _step(
            acc, weights, total, peak, q_tile, tiles, barriers, boxes, step, outer,
            True, EVERY, BOX, KEYS, STAGES, SCORES, ACC,
        )  # fmt: skip
    acc = warpgroup_mma(weights, v_tiles.index((count - 1) % STAGES), acc, is_async=True)
    weight = gate_rows(gate, live, rows, g_row, MOVED)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    output(out, lse, weight, coarse, acc, total, peak, order, place, end, live, rows, o_row, q_tile, ACC, MOVED)


@gluon.jit
def _answers(
    q, out, lse, gate, coarse, order, q_strides, o_strides, g_strides, lse_batch, lse_head, tiles, barriers, tables,
    list_batch, list_head, width, every, used, blocks, parts, heads, outer,
    PLACE: gl.constexpr, GROUPS: gl.constexpr, UNIT: gl.constexpr, SIGN: gl.constexpr, EVERY: gl.constexpr,
    BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What a group of warps does: the PLACE-th ROWS rows of the program's."""
    starts, ends, steps, taken = tables
    q_batch, q_row, q_head = q_strides
    o_batch, o_row, o_head = o_strides
    g_batch, g_row, g_head = g_strides
    block, head, sample, place, end, boxes, count = item_of(
        starts, ends, steps, taken, list_batch, list_head, width, every, used, blocks, parts, heads,
        GROUPS, EVERY, BOX, KEYS,
    )  # fmt: skip
    place += PLACE * ROWS
    if place < end:
        q_part = q + (sample * q_batch + head * q_head.to(gl.int64)) * UNIT
        out_part = out + (sample * o_batch + head * o_head.to(gl.int64)) * UNIT
        lse_part, gate_part, coarse_part = lse, gate, coarse
        if lse is not None:
            lse_part = lse + (sample * lse_batch + head * lse_head.to(gl.int64))
        if gate is not None:
            gate_part = gate + (sample * g_batch + head * g_head.to(gl.int64)) * UNIT
            coarse_part = coarse + ((sample * heads + head) * blocks + block) * WIDTH
        _answer(
            q_part, out_part, lse_part, gate_part, coarse_part, order, place, end, q_row.to(gl.int64) * UNIT,
            o_row.to(gl.int64) * UNIT, g_row.to(gl.int64) * UNIT, tiles[0].index(PLACE), tiles, barriers, boxes, count,
            outer, SIGN, EVERY, BOX, KEYS, STAGES,
        )  # fmt: skip
    else:
        _idle(barriers, count, STAGES)


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=INDICES)
def listed_hopper(
    q, out, lse, gate, coarse, k_described, v_described, order, starts, ends, steps, taken,
    q_batch, q_row, q_head, o_batch, o_row, o_head, g_batch, g_row, g_head, lse_batch, lse_head, list_batch, list_head,
    width, every, used, lines, blocks, parts, heads, group, outer,
    UNIT: gl.constexpr, SIGN: gl.constexpr, GROUPS: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A program has GROUPS times 64 rows of a query block: parts fastest, then blocks, heads, samples.

    As `listed_kernel` but for these; all head dims are 128, and rows of keys behind a partial box must be finite.
    k_described, v_described  boxes [BOX, PANEL] of k and v, packed in the order of places, as rows of WIDTH; `lines`
                              of a head
    BOX, KEYS, STAGES         `steps` are of BOX keys; a program takes KEYS at once, and has so many of those in flight
    """
    dtype: gl.constexpr = k_described.dtype
    LAYOUT: gl.constexpr = k_described.layout
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, WIDTH], LAYOUT)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], LAYOUT)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    tiles = (q_tiles, k_tiles, v_tiles)
    barriers = (k_full, v_full, empty)
    tables = (starts, ends, steps, taken)
    q_strides = (q_batch, q_row, q_head)
    o_strides = (o_batch, o_row, o_head)
    g_strides = (g_batch, g_row, g_head)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_answers, (
                    q, out, lse, gate, coarse, order, q_strides, o_strides, g_strides, lse_batch, lse_head, tiles,
                    barriers, tables, list_batch, list_head, width, every, used, blocks, parts, heads, outer,
                    0, GROUPS, UNIT, SIGN, EVERY, BOX, KEYS, STAGES,
                )),
                (_copies, (
                    k_described, v_described, tiles, barriers, tables, list_batch, list_head, width, every, used, lines,
                    blocks, parts, heads, group, GROUPS, EVERY, BOX, KEYS, STAGES,
                )),
            ],
            [1],
            [COPYING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_answers, (
                    q, out, lse, gate, coarse, order, q_strides, o_strides, g_strides, lse_batch, lse_head, tiles,
                    barriers, tables, list_batch, list_head, width, every, used, blocks, parts, heads, outer,
                    0, GROUPS, UNIT, SIGN, EVERY, BOX, KEYS, STAGES,
                )),
                (_answers, (
                    q, out, lse, gate, coarse, order, q_strides, o_strides, g_strides, lse_batch, lse_head, tiles,
                    barriers, tables, list_batch, list_head, width, every, used, blocks, parts, heads, outer,
                    1, GROUPS, UNIT, SIGN, EVERY, BOX, KEYS, STAGES,
                )),
                (_copies, (
                    k_described, v_described, tiles, barriers, tables, list_batch, list_head, width, every, used, lines,
                    blocks, parts, heads, group, GROUPS, EVERY, BOX, KEYS, STAGES,
                )),
            ],
            [4, 1],
            [ANSWERING, COPYING],
        )  # fmt: skip
