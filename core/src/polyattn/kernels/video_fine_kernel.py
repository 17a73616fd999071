"""Exact attention of blocks of query rows over listed key blocks, forward: the kernel.

Lists come as steps: places of BLOCK_N keys that are all there, and behind them what is left of partial blocks, so that
the main loop has no mask and nothing empty is computed.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from polyattn.kernels.video_parts import key_rows, load_rows, products, taken_in

#: Numbers that change from call to call; Triton would compile again for 1 and for multiples of 16.
_RUNTIME = (
    "q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head", "o_batch", "o_row",
    "o_head", "g_batch", "g_row", "g_head", "lse_batch", "lse_head", "list_batch", "list_head", "width", "every",
    "used", "lines", "blocks", "parts", "heads", "group",
)  # fmt: skip
#: Tensors that may be slices of others.
_INDICES = ("order_q", "order_k", "starts", "ends", "steps", "taken", "lse", "coarse")


@triton.jit
def _step(steps, step, whole, all_places, EVERY: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first place of one of `whole` steps, any place for others; where all places are seen there is no list."""
    if EVERY:
        found = tl.load(steps + step, mask=(step < whole) & (all_places == 0), other=0)
        return tl.where(all_places != 0, step * BLOCK_N, found)
    else:
        return tl.load(steps + step, mask=step < whole, other=0)


@triton.jit
def _queries(
    q, order, start, end, place, q_row,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Places [place, place + BLOCK_M) of a block that ends at `end` -> live, tensor rows (int64), q [BLOCK_M, D]."""
    places = place + tl.arange(0, BLOCK_M)
    live = places < end
    rows = places.to(tl.int64)
    if order is not None:
        rows = tl.load(order + places, mask=live, other=0).to(tl.int64)
    tile = load_rows(q, rows * q_row, live, D, BLOCK_D, True)
    if SIGN != 1.0:  # otherwise q is read from shared memory by every product, not through registers
        tile = (tile.to(tl.float32) * SIGN).to(tile.dtype)
    return live, rows, tile


@triton.jit
def _write(
    out, lse, gate, coarse, acc, total, peak, live, rows, o_row, g_row,
    V: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """The output of a tile, with the gated coarse term of its block; rows without a key are 0, their LSE -inf."""
    answered = live & (total != 0.0)  # a NaN stays a NaN
    total = tl.where(answered, total, 1.0)
    result = tl.where(answered[:, None], acc / total[:, None], 0.0)
    columns = tl.arange(0, BLOCK_V)
    mask = live[:, None] & (columns < V)[None, :]
    if gate is not None:
        weight = tl.load(gate + (rows * g_row)[:, None] + columns[None, :], mask=mask, other=0.0)
        result += weight.to(tl.float32) * tl.load(coarse + columns, mask=columns < V, other=0.0)[None, :]
    pointers = out + ((rows * o_row)[:, None] + columns[None, :])
    tl.store(pointers, result.to(out.dtype.element_ty), mask=mask)
    if lse is not None:
        natural = (peak + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + rows, tl.where(answered, natural, float("-inf")), mask=live)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_INDICES)
def listed_kernel(
    q, k, v, out, lse, gate, coarse, k_described, v_described, order_q, order_k, starts, ends, steps, taken,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
    g_batch, g_row, g_head, lse_batch, lse_head, list_batch, list_head, width, every, used, lines, blocks, parts,
    heads, group, outer,
    D: tl.constexpr, V: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, UNIT: tl.constexpr, WIDE: tl.constexpr, SIGN: tl.constexpr, EVERY: tl.constexpr,
    PAIRED: tl.constexpr,
):  # fmt: skip
    """A part of a query block a program: parts fastest, then blocks, heads, samples (heads fastest thrashes the L2).

    Strides count UNIT elements. `starts`, `ends`: places of each query block. order_q, order_k: tensor rows of places,
    None where they are the same.
    steps        [B|1, H|1, blocks, width]: first places of whole steps from the front; from the back those of partial
                 ones, times BLOCK_N, plus the keys there less one. taken [.., 2]: how many of each
    every, used  so many first blocks see all places before `used`, and have no steps
    coarse       float32 [B, H, blocks, V], for the gate
    k_described, v_described  None, or descriptors of k and v as rows: `lines` for each KV head of each sample
    PAIRED       two tiles of BLOCK_M rows a program: the softmax of one hides behind the products of the other
    """
    program = tl.program_id(0)
    part = program % parts
    block = program // parts % blocks
    head = program // parts // blocks % heads
    sample = program // parts // blocks // heads
    tiles: tl.constexpr = 2 if PAIRED else 1
    start = tl.load(starts + block)
    end = tl.load(ends + block)
    place = start + part * (BLOCK_M * tiles)
    if place >= end:
        return
    sample = sample.to(tl.int64)
    kv_head = head // group
    q_row = q_row.to(tl.int64) * UNIT
    k_row = k_row.to(tl.int64) * UNIT
    v_row = v_row.to(tl.int64) * UNIT
    o_row = o_row.to(tl.int64) * UNIT
    g_row = g_row.to(tl.int64) * UNIT
    q += (sample * q_batch + head * q_head.to(tl.int64)) * UNIT
    k += (sample * k_batch + kv_head * k_head.to(tl.int64)) * UNIT
    v += (sample * v_batch + kv_head * v_head.to(tl.int64)) * UNIT
    out += (sample * o_batch + head * o_head.to(tl.int64)) * UNIT
    line = ((sample * (heads // group) + kv_head) * lines).to(tl.int32)
    row = sample * list_batch + head * list_head.to(tl.int64) + block
    steps += row * width
    if gate is not None:
        gate += (sample * g_batch + head * g_head.to(tl.int64)) * UNIT
        coarse += ((sample * heads + head) * blocks + block) * V
    if lse is not None:
        lse += sample * lse_batch + head * lse_head.to(tl.int64)
    all_places = 0
    if EVERY:
        all_places = (block < every).to(tl.int32)
        whole = tl.where(all_places != 0, used // BLOCK_N, tl.load(taken + row * 2, mask=all_places == 0, other=0))
        some = tl.load(taken + row * 2 + 1, mask=all_places == 0, other=0)
        some = tl.where(all_places != 0, (used % BLOCK_N != 0).to(tl.int32), some)
    else:
        whole = tl.load(taken + row * 2)
        some = tl.load(taken + row * 2 + 1)

    live0, rows0, q0 = _queries(q, order_q, start, end, place, q_row, D, BLOCK_D, BLOCK_M, SIGN)
    acc0 = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    total0 = tl.zeros([BLOCK_M], tl.float32)
    peak0 = total0 + float("-inf")
    if PAIRED:
        live1, rows1, q1 = _queries(q, order_q, start, end, place + BLOCK_M, q_row, D, BLOCK_D, BLOCK_M, SIGN)
        acc1 = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
        total1 = tl.zeros([BLOCK_M], tl.float32)
        peak1 = total1 + float("-inf")
    inside = tl.arange(0, BLOCK_N)
    seen = inside < BLOCK_N

    # the next step's place is known a step ahead, else its rows could not be on their way as early
    first = _step(steps, 0, whole, all_places, EVERY, BLOCK_N)
    for step in range(whole):
        k_tile = key_rows(k, k_described, order_k, first, inside, seen, k_row, line, D, BLOCK_D, BLOCK_N, False, WIDE)
        scores0 = products(q0, k_tile)
        if PAIRED:
            scores1 = products(q1, k_tile)
        v_tile = key_rows(v, v_described, order_k, first, inside, seen, v_row, line, V, BLOCK_V, BLOCK_N, False, WIDE)
        first = _step(steps, step + 1, whole, all_places, EVERY, BLOCK_N)
        acc0, total0, peak0 = taken_in(acc0, total0, peak0, scores0, v_tile, outer, False)
        if PAIRED:
            acc1, total1, peak1 = taken_in(acc1, total1, peak1, scores1, v_tile, outer, False)

    for step in range(some):
        code = tl.load(steps + (width - 1 - step), mask=all_places == 0, other=0)
        first = tl.where(all_places != 0, used // BLOCK_N * BLOCK_N, code // BLOCK_N)
        seen = inside <= tl.where(all_places != 0, (used - 1) % BLOCK_N, code % BLOCK_N)
        k_tile = key_rows(k, k_described, order_k, first, inside, seen, k_row, line, D, BLOCK_D, BLOCK_N, True, WIDE)
        v_tile = key_rows(v, v_described, order_k, first, inside, seen, v_row, line, V, BLOCK_V, BLOCK_N, True, WIDE)
        scores0 = tl.where(seen[None, :], products(q0, k_tile), float("-inf"))
        acc0, total0, peak0 = taken_in(acc0, total0, peak0, scores0, v_tile, outer, True)
        if PAIRED:
            scores1 = tl.where(seen[None, :], products(q1, k_tile), float("-inf"))
            acc1, total1, peak1 = taken_in(acc1, total1, peak1, scores1, v_tile, outer, True)

    _write(out, lse, gate, coarse, acc0, total0, peak0, live0, rows0, o_row, g_row, V, BLOCK_V)
    if PAIRED:
        _write(out, lse, gate, coarse, acc1, total1, peak1, live1, rows1, o_row, g_row, V, BLOCK_V)
