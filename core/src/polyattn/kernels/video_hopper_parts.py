"""Parts of the Hopper kernels: what an item is, where its keys are, rows in and out, and the running softmax."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code=assignment

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

#: Head dim of keys and values; query rows of a group; columns of one copy: 128 bytes, within which rows are swizzled.
WIDTH, ROWS, PANEL = gl.constexpr(128), gl.constexpr(64), gl.constexpr(64)
#: Triton 3.6 has other names for two functions than its successors.
_OLD = gl.constexpr(hasattr(gl.shared_memory_descriptor, "_reinterpret"))
_load = tma.async_copy_global_to_shared if _OLD else tma.async_load

#: Numbers that change from call to call; Triton would compile again for 1 and for multiples of 16.
RUNTIME = (
    "q_batch", "q_row", "q_head", "o_batch", "o_row", "o_head", "g_batch", "g_row", "g_head", "lse_batch", "lse_head",
    "list_batch", "list_head", "width", "every", "used", "lines", "blocks", "parts", "heads", "group",
)  # fmt: skip
#: Tensors that may be slices of others.
INDICES = ("order", "starts", "ends", "steps", "taken", "lse", "coarse")


@gluon.jit
def item_of(
    starts, ends, steps, taken, list_batch, list_head, width, every, used, blocks, parts, heads,
    GROUPS: gl.constexpr, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """A program -> its block, head, sample, first place, the block's end, boxes, steps of KEYS keys; 0 without rows.

    The boxes are those of BOX keys that are all there, `whole`, and behind them `some` partial ones.
    """
    item = gl.program_id(0)
    part = item % parts
    block = item // parts % blocks
    head = item // parts // blocks % heads
    sample = (item // parts // blocks // heads).to(gl.int64)
    place = gl.load(starts + block) + part * (GROUPS * ROWS)
    end = gl.load(ends + block)
    row = sample * list_batch + head * list_head.to(gl.int64) + block
    dense = 0
    if EVERY:
        dense = (block < every).to(gl.int32)
        whole = gl.where(dense != 0, used // BOX, gl.load(taken + row * 2, mask=dense == 0, other=0))
        some = gl.load(taken + row * 2 + 1, mask=dense == 0, other=0)
        some = gl.where(dense != 0, (used % BOX != 0).to(gl.int32), some)
    else:
        whole = gl.load(taken + row * 2)
        some = gl.load(taken + row * 2 + 1)
    # a list of nothing takes one step, of which nothing is seen
    count = gl.maximum((whole + some + (KEYS // BOX - 1)) // (KEYS // BOX), 1)
    count = gl.where(place < end, count, 0)
    return block, head, sample, place, end, (steps + row * width, width, whole, some, used, dense), count


@gluon.jit
def _code(boxes, box, EVERY: gl.constexpr):
    """What `steps` say of a box; 0 of one that is not there, and of all in dense rows."""
    steps, width, whole, some, _, dense = boxes
    at = gl.where(box < whole, box, width - 1 - (box - whole))
    there = box < whole + some
    if EVERY:
        there = there & (dense == 0)
    return gl.load(steps + at, mask=there, other=0)


@gluon.jit
def _first_place(boxes, box, EVERY: gl.constexpr, BOX: gl.constexpr):
    """That of a box, any place of one that is not there."""
    code = _code(boxes, box, EVERY)
    place = gl.where(box < boxes[2], code, code // BOX)
    if EVERY:
        place = gl.where(boxes[5] != 0, box * BOX, place)
    return place


@gluon.jit
def _keys_seen(boxes, box, EVERY: gl.constexpr, BOX: gl.constexpr):
    """How many keys of a box are seen, from the front."""
    _, _, whole, some, used, dense = boxes
    code = _code(boxes, box, EVERY)
    count = gl.where(box < whole, BOX, gl.where(box < whole + some, code % BOX + 1, 0))
    if EVERY:
        count = gl.where(dense != 0, gl.minimum(gl.maximum(used - box * BOX, 0), BOX), count)
    return count


@gluon.jit
def copy(
    described, tiles, full, empty, step, freed, line, boxes,
    EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Start copying the rows of one step into their place, which is free with the keys of step `freed` - STAGES."""
    BOXES: gl.constexpr = KEYS // BOX
    PANELS: gl.constexpr = WIDTH // PANEL
    slot = step % STAGES
    # a tile in shared memory is a column of panels, each of which is a column of boxes
    if _OLD:
        pieces = tiles.index(slot)._reinterpret(described.dtype, [PANELS * BOXES, BOX, PANEL], described.layout)
    else:
        pieces = tiles.index(slot).reinterpret(described.dtype, [PANELS * BOXES, BOX, PANEL], described.layout)
    rows = ()
    for box in gl.static_range(BOXES):  # before the wait, so that the loads' time is the wait's
        row = line + _first_place(boxes, step * BOXES + box, EVERY, BOX)
        rows = rows + (row,)  # noqa: RUF005 - Triton knows no stars
    mbarrier.wait(empty.index(freed % STAGES), (freed // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(slot), KEYS * WIDTH * 2)
    for box in gl.static_range(BOXES):
        for panel in gl.static_range(PANELS):
            piece = pieces.index(panel * BOXES + box)
            _load(described, [rows[box], panel * PANEL], full.index(slot), piece)


@gluon.jit
def live_rows(order, place, end, LAYOUT: gl.constexpr):
    """Places [place, place + ROWS) of a block that ends at `end` -> live, tensor rows."""
    places = place + gl.arange(0, ROWS, LAYOUT)
    live = places < end
    return live, gl.load(order + places, mask=live, other=0)


@gluon.jit
def _whole_rows(base, rows, row, MOVED: gl.constexpr):
    """Where tensor rows are, which are `row` elements apart."""
    columns = gl.arange(0, WIDTH, gl.SliceLayout(0, MOVED))
    return base + ((rows.to(gl.int64) * row)[:, None] + columns[None, :])


@gluon.jit
def queries_in(
    q, order, place, end, q_row, q_tile, SIGN: gl.constexpr, MOVED: gl.constexpr
):  # fmt: skip
    """Rows of q, times SIGN, into shared memory -> live, tensor rows."""
    live, rows = live_rows(order, place, end, gl.SliceLayout(1, MOVED))
    tile = gl.load(_whole_rows(q, rows, q_row, MOVED), mask=live[:, None], other=0.0)
    if SIGN != 1.0:
        tile = (tile.to(gl.float32) * SIGN).to(tile.dtype)
    q_tile.store(tile)
    fence_async_shared()
    return live, rows


@gluon.jit
def gate_rows(gate, live, rows, g_row, MOVED: gl.constexpr):
    """Rows of the gate, if there is one."""
    weight = None
    if gate is not None:
        weight = gl.load(_whole_rows(gate, rows, g_row, MOVED), mask=live[:, None], other=0.0)
    return weight


@gluon.jit
def hidden(scores, boxes, step, EVERY: gl.constexpr, BOX: gl.constexpr, KEYS: gl.constexpr, LAYOUT: gl.constexpr):
    """Scores of a step, of which those of keys that are not there are -inf."""
    columns = gl.arange(0, KEYS, gl.SliceLayout(0, LAYOUT))
    limits = gl.full([KEYS], 0, gl.int32, gl.SliceLayout(0, LAYOUT))
    for box in gl.static_range(KEYS // BOX):
        limits = gl.where(columns // BOX == box, _keys_seen(boxes, step * (KEYS // BOX) + box, EVERY, BOX), limits)
    return gl.where((columns % BOX < limits)[None, :], scores, float("-inf"))


@gluon.jit
def weighed(scores, total, peak, outer, SOME: gl.constexpr):
    """Weights of scores, what the sums so far shrink by, and the new total and peak; SOME: scores may be -inf."""
    new_peak = gl.maximum(peak, gl.max(scores, 1) * outer)
    reference = new_peak
    if SOME:  # rows that have seen nothing so far
        reference = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = gl.exp2(scores * outer - reference[:, None])
    shrink = gl.exp2(peak - reference)
    return weights, shrink, total * shrink + gl.sum(weights, 1), new_peak


@gluon.jit
def output(
    out, lse, weight, coarse, acc, total, peak, order, place, end, live, rows, o_row, q_tile,
    ACC: gl.constexpr, MOVED: gl.constexpr,
):  # fmt: skip
    """As `_write` of `video_fine_kernel.py`; `weight` is the gate's rows or None."""
    total = gl.convert_layout(total, gl.SliceLayout(1, ACC))
    mine = place + gl.arange(0, ROWS, gl.SliceLayout(1, ACC)) < end
    answered = mine & (total != 0.0)  # a NaN stays a NaN
    total = gl.where(answered, total, 1.0)
    result = gl.where(answered[:, None], acc * (1.0 / total)[:, None], 0.0)
    if lse is not None:
        natural = (gl.convert_layout(peak, gl.SliceLayout(1, ACC)) + gl.log2(total)) * 0.6931471805599453
        _, targets = live_rows(order, place, end, gl.SliceLayout(1, ACC))
        gl.store(lse + targets.to(gl.int64), gl.where(answered, natural, float("-inf")), mask=mine)
    # the queries are done with: through their place in shared memory, whole lines are read and written
    if weight is not None:
        q_tile.store(weight)
        part = gl.load(coarse + gl.arange(0, WIDTH, gl.SliceLayout(0, ACC)))
        result += q_tile.load(ACC).to(gl.float32) * part[None, :]
    q_tile.store(result.to(q_tile.dtype))
    gl.store(_whole_rows(out, rows, o_row, MOVED), q_tile.load(MOVED), mask=live[:, None])
