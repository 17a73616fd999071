"""As `video_hopper_kernel.py`, without roles: eight warps have 128 query rows, and copy keys and values for themselves.

They start a copy as soon as what it overwrites is used up. All keep in step, so that what is not hidden behind the
products of the same step stays seen.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from polyattn.kernels.video_hopper_parts import (
    INDICES,
    ITEM,
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


@gluon.jit
def _step(
    acc, weights, total, peak, q_tile, tiles, barriers, described, line, boxes, step, count, outer,
    SOME: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, ACC: gl.constexpr,
):  # fmt: skip
    """Scores of a step; the values of the step before by its `weights` go into `acc` while these are taken in."""
    k_tiles, v_tiles = tiles
    k_full, v_full = barriers
    k_described, v_described = described
    slot = step % STAGES
    before = (step - 1) % STAGES
    mbarrier.wait(k_full.index(slot), step // STAGES & 1)
    nothing = gl.zeros([ITEM, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    if step + STAGES < count:
        copy(k_described, k_tiles, k_full, None, step + STAGES, 0, line, boxes, step + STAGES, EVERY, BOX, KEYS, STAGES)
    if SOME:
        scores = hidden(scores, boxes, step, EVERY, BOX, KEYS, SCORES)
    new, shrink, total, peak = weighed(scores, total, peak, outer, SOME)
    # here, not before their products: without a branch between them, ptxas waits for `acc` before it weighs the scores
    mbarrier.wait(v_full.index(slot), step // STAGES & 1)
    acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
    next_one = step - 1 + STAGES
    if next_one < count:
        copy(v_described, v_tiles, v_full, None, next_one, 0, line, boxes, next_one, EVERY, BOX, KEYS, STAGES)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, ACC))[:, None]
    return acc, gl.convert_layout(new.to(weights.dtype), gl.DotOperandLayout(0, ACC, 2)), total, peak


@gluon.jit(do_not_specialize=RUNTIME, do_not_specialize_on_alignment=INDICES)
def listed_hopper_alone(
    q, out, lse, gate, coarse, k_described, v_described, counter, order, starts, ends, steps, taken,
    q_batch, q_row, q_head, o_batch, o_row, o_head, g_batch, g_row, g_head, lse_batch, lse_head, list_batch, list_head,
    width, every, used, lines, blocks, parts, heads, group, items, outer,
    UNIT: gl.constexpr, SIGN: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr,
    STAGES: gl.constexpr, TURNS: gl.constexpr, LATE: gl.constexpr, ONCE: gl.constexpr, COPYING: gl.constexpr,
):  # fmt: skip
    """As `listed_hopper`, for eight warps and an item a program; `counter` and what is behind STAGES say nothing."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, KEYS, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, WIDTH, 16])
    MOVED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    block, head, sample, place, end, boxes, count = item_of(
        gl.program_id(0), starts, ends, steps, taken, list_batch, list_head, width, every, used, blocks, parts, heads,
        EVERY, BOX, KEYS,
    )  # fmt: skip
    if place < end:
        dtype: gl.constexpr = k_described.dtype
        LAYOUT: gl.constexpr = k_described.layout
        q_tile = gl.allocate_shared_memory(dtype, [ITEM, WIDTH], LAYOUT)
        k_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], LAYOUT)
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES, KEYS, WIDTH], LAYOUT)
        k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(STAGES):
            mbarrier.init(k_full.index(slot), count=1)
            mbarrier.init(v_full.index(slot), count=1)
        line = ((sample * (heads // group) + head // group) * lines).to(gl.int32)
        for step in gl.static_range(STAGES):
            if step < count:
                copy(k_described, k_tiles, k_full, None, step, 0, line, boxes, step, EVERY, BOX, KEYS, STAGES)
                copy(v_described, v_tiles, v_full, None, step, 0, line, boxes, step, EVERY, BOX, KEYS, STAGES)
        q += (sample * q_batch + head * q_head.to(gl.int64)) * UNIT
        live, rows = queries_in(q, order, place, end, q_row.to(gl.int64) * UNIT, q_tile, ITEM, SIGN, MOVED)

        peak = gl.full([ITEM], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
        total = gl.zeros([ITEM], gl.float32, gl.SliceLayout(1, SCORES))
        acc = gl.zeros([ITEM, WIDTH], gl.float32, ACC)
        mbarrier.wait(k_full.index(0), 0)
        nothing = gl.zeros([ITEM, KEYS], gl.float32, SCORES)
        scores = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        if count > STAGES:
            copy(k_described, k_tiles, k_full, None, STAGES, 0, line, boxes, STAGES, EVERY, BOX, KEYS, STAGES)
        scores = hidden(scores, boxes, 0, EVERY, BOX, KEYS, SCORES)
        new, _, total, peak = weighed(scores, total, peak, outer, True)
        weights = gl.convert_layout(new.to(dtype), gl.DotOperandLayout(0, ACC, 2))
        mbarrier.wait(v_full.index(0), 0)
        seen = gl.maximum(boxes[2] // (KEYS // BOX), 1)  # so many first steps have no mask
        tiles = (k_tiles, v_tiles)
        barriers = (k_full, v_full)
        described = (k_described, v_described)
        for step in range(1, seen):
            acc, weights, total, peak = _step(
                acc, weights, total, peak, q_tile, tiles, barriers, described, line, boxes, step, count, outer,
                False, EVERY, BOX, KEYS, STAGES, SCORES, ACC,
            )  # fmt: skip
        for step in range(seen, count):
            acc, weights, total, peak = _step(
                acc, weights, total, peak, q_tile, tiles, barriers, described, line, boxes, step, count, outer,
                True, EVERY, BOX, KEYS, STAGES, SCORES, ACC,
            )  # fmt: skip
        acc = warpgroup_mma(weights, v_tiles.index((count - 1) % STAGES), acc, is_async=True)
        if gate is not None:
            gate += (sample * g_batch + head * g_head.to(gl.int64)) * UNIT
            coarse += ((sample * heads + head) * blocks + block) * WIDTH
        weight = gate_rows(gate, live, rows, g_row.to(gl.int64) * UNIT, MOVED)
        acc, weights = warpgroup_mma_wait(0, deps=(acc, weights))
        out += (sample * o_batch + head * o_head.to(gl.int64)) * UNIT
        if lse is not None:
            lse += sample * lse_batch + head * lse_head.to(gl.int64)
        output(
            out, lse, weight, coarse, acc, total, peak, order, place, end, live, rows, o_row.to(gl.int64) * UNIT,
            q_tile, ITEM, ACC, MOVED,
        )  # fmt: skip
