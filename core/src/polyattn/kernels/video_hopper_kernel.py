"""Exact attention of blocks of query rows over listed key blocks, forward, on Hopper: the kernel, in Gluon.

One warp copies keys and values into shared memory; groups of four warps have 64 query rows of one list each. A
group starts the products of a step's scores and those of the step before with its values, and takes in the new scores
while the latter run. `video_fine_kernel.py` says what is computed.
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

#: Registers of a thread for which three groups of 128 threads have room, all together.
REGISTERS = gl.constexpr(504)


@gluon.jit
def _copies(
    k_described, v_described, tiles, barriers, telling, counter, tables, list_batch, list_head, width, every, used,
    lines, blocks, parts, heads, group, items,
    GROUPS: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    ONCE: gl.constexpr,
):  # fmt: skip
    """What the copying warp does: keys of a step, then values of the step before, as they are asked for."""
    k_tiles, v_tiles = tiles[1], tiles[2]
    k_full, k_empty, v_full, v_empty = barriers[0], barriers[1], barriers[2], barriers[3]
    told, told_full, told_empty = telling
    starts, ends, steps, taken = tables
    done = 0
    asked = 0
    item = gl.program_id(0)
    while item < items:
        following = items
        if counter is not None:
            # two are told ahead, so that this warp is never held up by groups that have not come to the end of theirs
            following = gl.atomic_add(counter, 1) + gl.num_programs(0)
            mbarrier.wait(told_empty.index(asked % 2), (asked // 2 & 1) ^ 1)
            told.index(asked % 2).store(gl.full([1], following, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
            mbarrier.arrive(told_full.index(asked % 2), count=1)
        _block, head, sample, _start, _end, boxes, count = item_of(
            item, starts, ends, steps, taken, list_batch, list_head, width, every, used, blocks, parts, heads,
            GROUPS, EVERY, BOX, KEYS,
        )  # fmt: skip
        line = ((sample * (heads // group) + head // group) * lines).to(gl.int32)
        for step in range(count + 1):
            if step < count:
                number = done + step
                copy(k_described, k_tiles, k_full, k_empty, number, number, line, boxes, step, EVERY, BOX, KEYS, STAGES)
            if step > 0:
                before = step - 1
                number = done + before
                # given back with the keys of the step behind
                free, freed = (k_empty, number + 1) if ONCE else (v_empty, number)
                copy(v_described, v_tiles, v_full, free, number, freed, line, boxes, before, EVERY, BOX, KEYS, STAGES)
        done += count
        asked += 1
        item = following


@gluon.jit
def _step(
    acc, weights, shrink, total, peak, q_tile, tiles, barriers, number, turn, boxes, step, outer,
    HALF: gl.constexpr, SOME: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr, ONCE: gl.constexpr, SCORES: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """Scores of step `number`; the values of the step before by its `weights` go into `acc` while these are taken in.

    TURNS  one group starts its products while the other takes in its scores
    ONCE   keys of a step and values of the step before are given back at once, which takes fewer barriers, but later
    LATE   `acc` shrinks behind the start of the next scores' product, not before
    """
    _, k_tiles, v_tiles = tiles
    k_full, k_empty, v_full, v_empty, turns = barriers
    slot = number % STAGES
    before = (number - 1) % STAGES
    mbarrier.wait(k_full.index(slot), number // STAGES & 1)
    if TURNS:
        mbarrier.wait(turns.index(HALF), (turn & 1) ^ (1 - HALF))
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    if LATE:
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index(1 - HALF), count=1)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if not ONCE:
        mbarrier.arrive(k_empty.index(slot), count=1)
    if SOME:
        scores = hidden(scores, boxes, step, EVERY, BOX, KEYS, SCORES)
    new, shrink, total, peak = weighed(scores, total, peak, outer, SOME)
    # here, not before their products: without a branch between them, ptxas waits for `acc` before it weighs the scores
    mbarrier.wait(v_full.index(slot), number // STAGES & 1)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    if ONCE:
        mbarrier.arrive(k_empty.index(slot), count=1)
    else:
        mbarrier.arrive(v_empty.index(before), count=1)
    if not LATE:
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
    return acc, gl.convert_layout(new.to(weights.dtype), gl.DotOperandLayout(0, ACC, 2)), shrink, total, peak


@gluon.jit
def _idle(
    barriers, done, turn, count, HALF: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, ONCE: gl.constexpr
):  # fmt: skip
    """What a group without rows owes the others."""
    k_full, k_empty, v_full, v_empty, turns = barriers
    for step in range(count):
        number = done + step
        slot = number % STAGES
        mbarrier.wait(k_full.index(slot), number // STAGES & 1)
        mbarrier.arrive(k_empty.index(slot), count=1)
        if TURNS and step > 0:
            mbarrier.wait(turns.index(HALF), ((turn + step - 1) & 1) ^ (1 - HALF))
            mbarrier.arrive(turns.index(1 - HALF), count=1)
        if not ONCE:
            mbarrier.wait(v_full.index(slot), number // STAGES & 1)
            mbarrier.arrive(v_empty.index(slot), count=1)


@gluon.jit
def _answer(
    q, out, lse, gate, coarse, order, place, end, q_row, o_row, g_row, tiles, barriers, done, turn, boxes, count, outer,
    HALF: gl.constexpr, SIGN: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr, ONCE: gl.constexpr,
):  # fmt: skip
    """Rows [place, place + ROWS) of a block that ends at `end`, from their queries to their output."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    MOVED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    q_tiles, k_tiles, v_tiles = tiles
    k_full, k_empty, v_full, v_empty, _ = barriers
    q_tile = q_tiles.index(HALF)
    live, rows = queries_in(q, order, place, end, q_row, q_tile, SIGN, MOVED)
    peak = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([ROWS, WIDTH], gl.float32, ACC)
    slot = done % STAGES
    mbarrier.wait(k_full.index(slot), done // STAGES & 1)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(k_empty.index(slot), count=1)
    scores = hidden(scores, boxes, 0, EVERY, BOX, KEYS, SCORES)
    new, shrink, total, peak = weighed(scores, total, peak, outer, True)
    weights = gl.convert_layout(new.to(q_tile.dtype), gl.DotOperandLayout(0, ACC, 2))
    mbarrier.wait(v_full.index(slot), done // STAGES & 1)
    seen = gl.maximum(boxes[2] // (KEYS // BOX), 1)  # so many first steps have no mask
    for step in range(1, seen):
        acc, weights, shrink, total, peak = _step(
            acc, weights, shrink, total, peak, q_tile, tiles, barriers, done + step, turn + step - 1, boxes, step,
            outer, HALF, False, EVERY, BOX, KEYS, STAGES, TURNS, LATE, ONCE, SCORES, ACC,
        )  # fmt: skip
    for step in range(seen, count):
        acc, weights, shrink, total, peak = _step(
            acc, weights, shrink, total, peak, q_tile, tiles, barriers, done + step, turn + step - 1, boxes, step,
            outer, HALF, True, EVERY, BOX, KEYS, STAGES, TURNS, LATE, ONCE, SCORES, ACC,
        )  # fmt: skip
    slot = (done + count - 1) % STAGES
    if LATE:
        acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
    acc = warpgroup_mma(weights, v_tiles.index(slot), acc, is_async=True)
    weight = gate_rows(gate, live, rows, g_row, MOVED)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    if not ONCE:
        mbarrier.arrive(v_empty.index(slot), count=1)
    output(
        out, lse, weight, coarse, acc, total, peak, order, place, end, live, rows, o_row, q_tile, ACC, MOVED
    )  # fmt: skip


@gluon.jit
def _answers(
    q, out, lse, gate, coarse, order, q_strides, o_strides, g_strides, lse_batch, lse_head, tiles, barriers, telling,
    counter, tables,
    list_batch, list_head, width, every, used, blocks, parts, heads, items, outer,
    HALF: gl.constexpr, GROUPS: gl.constexpr, UNIT: gl.constexpr, SIGN: gl.constexpr, EVERY: gl.constexpr,
    BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr,
    ONCE: gl.constexpr,
):  # fmt: skip
    """What a group of warps does: the first or the second ROWS rows of each item."""
    starts, ends, steps, taken = tables
    q_batch, q_row, q_head = q_strides
    o_batch, o_row, o_head = o_strides
    g_batch, g_row, g_head = g_strides
    done = 0
    turn = 0
    answered = 0
    told, told_full, told_empty = telling
    item = gl.program_id(0)
    while item < items:
        block, head, sample, place, end, boxes, count = item_of(
            item, starts, ends, steps, taken, list_batch, list_head, width, every, used, blocks, parts, heads,
            GROUPS, EVERY, BOX, KEYS,
        )  # fmt: skip
        place += HALF * ROWS
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
                o_row.to(gl.int64) * UNIT, g_row.to(gl.int64) * UNIT, tiles, barriers, done, turn, boxes, count, outer,
                HALF, SIGN, EVERY, BOX, KEYS, STAGES, TURNS, LATE, ONCE,
            )  # fmt: skip
        else:
            _idle(barriers, done, turn, count, HALF, STAGES, TURNS, ONCE)
        done += count
        turn += gl.maximum(count - 1, 0)
        if counter is not None:
            mbarrier.wait(told_full.index(answered % 2), answered // 2 & 1)
            item = gl.max(told.index(answered % 2).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(told_empty.index(answered % 2), count=1)
            answered += 1
        else:
            item = items


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=INDICES)
def listed_hopper(
    q, out, lse, gate, coarse, k_described, v_described, counter, order, starts, ends, steps, taken,
    q_batch, q_row, q_head, o_batch, o_row, o_head, g_batch, g_row, g_head, lse_batch, lse_head, list_batch, list_head,
    width, every, used, lines, blocks, parts, heads, group, items, outer,
    UNIT: gl.constexpr, SIGN: gl.constexpr, GROUPS: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr, ONCE: gl.constexpr,
    COPYING: gl.constexpr,
):  # fmt: skip
    """Items are GROUPS times 64 rows of a query block: parts fastest, then blocks, heads, samples.

    As `listed_kernel` but for these; all head dims are 128, and rows of keys behind a partial box must be finite.
    counter                   0, where a program takes another item whenever it is done with one; None: it takes one
    k_described, v_described  boxes [BOX, PANEL] of k and v, packed in the order of places, as rows of WIDTH
    BOX, KEYS, STAGES         `steps` are of BOX keys; a program takes KEYS at once, and has so many of those in flight
    TURNS, LATE, ONCE         as `_step` has them
    COPYING                   registers of a thread that copies
    """
    dtype: gl.constexpr = k_described.dtype
    LAYOUT: gl.constexpr = k_described.layout
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, ROWS, WIDTH], LAYOUT)
    k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], LAYOUT)
    v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], LAYOUT)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(k_full.index(slot), count=1)
        mbarrier.init(k_empty.index(slot), count=GROUPS)
        mbarrier.init(v_full.index(slot), count=1)
        mbarrier.init(v_empty.index(slot), count=GROUPS)
    for half in gl.static_range(2):
        mbarrier.init(turns.index(half), count=1)
    told = gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    told_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2):
        mbarrier.init(told_full.index(place), count=1)
        mbarrier.init(told_empty.index(place), count=GROUPS)
    telling = (told, told_full, told_empty)
    tiles = (q_tiles, k_tiles, v_tiles)
    barriers = (k_full, k_empty, v_full, v_empty, turns)
    tables = (starts, ends, steps, taken)
    q_strides = (q_batch, q_row, q_head)
    o_strides = (o_batch, o_row, o_head)
    g_strides = (g_batch, g_row, g_head)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_answers, (
                    q, out, lse, gate, coarse, order, q_strides, o_strides, g_strides, lse_batch, lse_head, tiles, barriers,
                    telling, counter, tables, list_batch, list_head, width, every, used, blocks, parts, heads, items, outer,
                    0, GROUPS, UNIT, SIGN, EVERY, BOX, KEYS, STAGES, TURNS, LATE, ONCE,
                )),
                (_copies, (
                    k_described, v_described, tiles, barriers, telling, counter, tables, list_batch, list_head, width,
                    every, used, lines, blocks, parts, heads, group, items, GROUPS, EVERY, BOX, KEYS, STAGES, ONCE,
                )),
            ],
            [1],
            [COPYING],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_answers, (
                    q, out, lse, gate, coarse, order, q_strides, o_strides, g_strides, lse_batch, lse_head, tiles, barriers,
                    telling, counter, tables, list_batch, list_head, width, every, used, blocks, parts, heads, items, outer,
                    0, GROUPS, UNIT, SIGN, EVERY, BOX, KEYS, STAGES, TURNS, LATE, ONCE,
                )),
                (_answers, (
                    q, out, lse, gate, coarse, order, q_strides, o_strides, g_strides, lse_batch, lse_head, tiles, barriers,
                    telling, counter, tables, list_batch, list_head, width, every, used, blocks, parts, heads, items, outer,
                    1, GROUPS, UNIT, SIGN, EVERY, BOX, KEYS, STAGES, TURNS, LATE, ONCE,
                )),
                (_copies, (
                    k_described, v_described, tiles, barriers, telling, counter, tables, list_batch, list_head, width,
                    every, used, lines, blocks, parts, heads, group, items, GROUPS, EVERY, BOX, KEYS, STAGES, ONCE,
                )),
            ],
            [4, 1],
            [(REGISTERS - COPYING) // 16 * 8, COPYING],
        )  # fmt: skip
