"""Kernels that choose blocks: means of rows, scores and the coarse branch, the highest scores as lists."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=("batch", "row", "head_step", "blocks", "heads"),
    do_not_specialize_on_alignment=("order", "starts"),
)
def pool_kernel(
    x, means, order, starts, batch, row, head_step, blocks, heads,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Means of the rows of each block of x [B,S,H,SIZE]: float32 [B,H,blocks,SIZE]. A block of a head a program.

    Strides count UNIT elements.
    """
    program = tl.program_id(0)
    block = program % blocks
    head = program // blocks % heads
    sample = (program // blocks // heads).to(tl.int64)
    start = tl.load(starts + block)
    end = tl.load(starts + block + 1)
    x += (sample * batch + head * head_step.to(tl.int64)) * UNIT
    columns = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for first in range(start, end, ROWS):
        places = first + tl.arange(0, ROWS)
        there = places < end
        rows = tl.load(order + places, mask=there, other=0).to(tl.int64)
        mask = there[:, None] & (columns < SIZE)[None, :]
        values = tl.load(x + (rows * (row.to(tl.int64) * UNIT))[:, None] + columns[None, :], mask=mask, other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
    means += ((sample * heads + head) * blocks + block) * SIZE
    tl.store(means + columns, total / tl.maximum(end - start, 1).to(tl.float32), mask=columns < SIZE)


@triton.jit(do_not_specialize=("blocks", "tiles", "heads", "group"))
def score_kernel(
    q_means, k_means, v_means, scores, coarse, blocks, tiles, heads, group, outer,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, SIGN: tl.constexpr, TF32: tl.constexpr,
):  # fmt: skip
    """Products of means, by the sign of the scale: float32 [B,H,blocks,blocks]; of ROWS blocks of a head a program.

    coarse   None, or float32 [B,H,blocks,V]: the softmax of the scores over all blocks times `v_means`
    scores   None where only the coarse branch is asked for
    outer    what makes scores powers of two
    """
    # three products of tf32 keep the digits of float32
    PRECISION: tl.constexpr = "tf32x3" if TF32 else "ieee"
    program = tl.program_id(0)
    head = program // tiles % heads
    sample = (program // tiles // heads).to(tl.int64)
    kv = (sample * (heads // group) + head // group) * blocks
    row = sample * heads + head
    inside = tl.arange(0, COLUMNS)
    dims = tl.arange(0, BLOCK_D)
    values = tl.arange(0, BLOCK_V)
    queries = program % tiles * ROWS + tl.arange(0, ROWS)
    live = queries < blocks
    q = tl.load(
        q_means + ((row * blocks + queries) * D)[:, None] + dims[None, :],
        mask=live[:, None] & (dims < D)[None, :], other=0.0,
    )  # fmt: skip
    if SIGN != 1.0:
        q = q * SIGN
    acc = tl.zeros([ROWS, BLOCK_V], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    peak = total + float("-inf")
    for first in range(0, blocks, COLUMNS):
        keys = first + inside
        there = keys < blocks
        k = tl.load(
            k_means + ((kv + keys) * D)[:, None] + dims[None, :], mask=there[:, None] & (dims < D)[None, :], other=0.0
        )
        found = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if scores is not None:
            target = scores + ((row * blocks + queries) * blocks)[:, None] + keys[None, :]
            tl.store(target, found, mask=live[:, None] & there[None, :])
        if coarse is not None:
            found = tl.where(there[None, :], found, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(found, 1) * outer)
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(found * outer - reference[:, None])
            shrink = tl.exp2(peak - reference)
            total = total * shrink + tl.sum(weights, 1)
            v = tl.load(
                v_means + ((kv + keys) * V)[:, None] + values[None, :],
                mask=there[:, None] & (values < V)[None, :], other=0.0,
            )  # fmt: skip
            acc = tl.dot(weights, v, acc * shrink[:, None], input_precision=PRECISION)
            peak = new_peak
    if coarse is not None:
        answered = total != 0.0
        result = tl.where(answered[:, None], acc / tl.where(answered, total, 1.0)[:, None], 0.0)
        target = coarse + ((row * blocks + queries) * V)[:, None] + values[None, :]
        tl.store(target, result, mask=live[:, None] & (values < V)[None, :])


@triton.jit(do_not_specialize=("blocks", "prefix", "kept", "width", "rows"))
def choose_kernel(
    scores, lists, counts, blocks, prefix, kept, width, rows,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The `kept` highest of the scores behind `prefix`, and all before: lists int32 [.., width], ascending.

    A row of scores [.., blocks, blocks] a program; the first `prefix` of each `rows` are left out. Of equal scores the
    first are taken; a NaN counts as -inf.
    The bits of a float, but for the sign, have its order: the least score that is taken is found bit by bit, exactly,
    however far the scores are apart.
    """
    program = tl.program_id(0).to(tl.int64)
    row = program // rows * blocks + prefix + program % rows
    columns = tl.arange(0, BLOCK)
    there = columns < blocks - prefix
    found = tl.load(scores + row * blocks + prefix + columns, mask=there, other=0.0)
    found = tl.where(found == found, found, float("-inf"))
    found = tl.where(found == 0.0, 0.0, found)  # -0.0 equals it
    bits = found.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    least = tl.where(there, keys, -2147483648)  # less than -inf
    # the highest `edge` that at least `kept` keys reach, from the sign on, or the first found that just so many reach
    reached = tl.sum((least >= 0).to(tl.int32), 0)
    edge = tl.where(reached >= kept, 0, -2147483648)
    above_edge = tl.where(reached >= kept, reached, BLOCK)
    bit = 30
    while (bit >= 0) & (above_edge != kept):
        candidate = edge + (1 << bit)
        reached = tl.sum((least >= candidate).to(tl.int32), 0)
        edge = tl.where(reached >= kept, candidate, edge)
        above_edge = tl.where(reached >= kept, reached, above_edge)
        bit -= 1
    above = (least > edge).to(tl.int32)
    equal = (there & (least == edge)).to(tl.int32)
    spare = kept - tl.sum(above, 0)
    equal = tl.where(tl.cumsum(equal, 0) <= spare, equal, 0)
    chosen = above + equal
    places = prefix + tl.cumsum(chosen, 0) - chosen
    lists += row * width
    tl.store(lists + places, prefix + columns, mask=chosen != 0)
    for first in range(0, prefix, BLOCK):
        tl.store(lists + first + columns, first + columns, mask=first + columns < prefix)
    tl.store(counts + row, prefix + kept)
