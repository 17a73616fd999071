"""Exact attention in one pass over the keys (flash attention), forward: the kernel and its two entries.

Everything that decides who sees whom comes as data: boundaries of documents, used lengths, kept keys, ends of visible
keys. Sizes, lengths and strides are run-time numbers, so that a change of them compiles nothing.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

import triton
import triton.language as tl

from polyattn.kernels.softcap_parts import bent

#: Numbers that change from call to call; Triton would compile again for 1 and for multiples of 16.
_RUNTIME = (
    "q_batch", "q_row", "q_head", "k_batch", "k_row", "k_head", "v_batch", "v_row", "v_head", "o_batch", "o_row",
    "o_head", "lse_head", "rows_q", "rows_k", "seen_k", "asked_q", "shift", "left", "right", "documents", "heads",
    "group", "blocks",
)  # fmt: skip
#: Tensors of lengths, which may be slices of others.
_LENGTHS = ("cu_q", "cu_k", "used_q", "used_k", "only_if")


@triton.jit
def _load_rows(base, offsets, seen, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SOME: tl.constexpr):
    """Columns [FIRST, FIRST + WIDTH) of rows [n, SIZE]; 0 past SIZE and, where SOME, in rows that are not `seen`."""
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + (offsets[:, None] + columns[None, :])
    if FIRST + WIDTH > SIZE:
        if SOME:
            return tl.load(pointers, mask=seen[:, None] & (columns < SIZE)[None, :], other=0.0)
        else:
            return tl.load(pointers, mask=(columns < SIZE)[None, :], other=0.0)
    else:
        if SOME:
            return tl.load(pointers, mask=seen[:, None], other=0.0)
        else:
            return tl.load(pointers)


@triton.jit
def _store_rows(base, offsets, live, rows, FIRST: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    columns = FIRST + tl.arange(0, WIDTH)
    pointers = base + (offsets[:, None] + columns[None, :])
    tl.store(pointers, rows.to(base.dtype.element_ty), mask=live[:, None] & (columns < SIZE)[None, :])


@triton.jit
def _scan(
    acc0, acc1, total, peak, q0, q1, k, v, k_offsets, v_offsets, k_row, v_row, keep, first, last, low, high, start,
    stop, inner, outer,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_N: tl.constexpr, LEFT: tl.constexpr, CAPPED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The running softmax over keys [start, stop), `start` a multiple of BLOCK_N.

    EDGE: row i sees keys [first[i], last[i]) only, no row sees a key outside [low, high). Otherwise all rows see all.
    """
    for position in range(start, stop, BLOCK_N):
        position = tl.multiple_of(position, BLOCK_N)
        keys = position + tl.arange(0, BLOCK_N)
        seen = keys < high
        if LEFT:
            seen = seen & (keys >= low)
        if keep is not None:
            seen = seen & (tl.load(keep + keys, mask=seen, other=0) != 0)
        SOME: tl.constexpr = EDGE or keep is not None
        k_tile = k + position * k_row
        scores = tl.dot(q0, tl.trans(_load_rows(k_tile, k_offsets, seen, 0, D0, D, SOME)), input_precision="ieee")
        if D1 > 0:
            k1 = _load_rows(k_tile, k_offsets, seen, D0, D1, D, SOME)
            scores = tl.dot(q1, tl.trans(k1), scores, input_precision="ieee")
        if CAPPED > 0:
            scores = bent(scores * inner, CAPPED)
        if EDGE:
            visible = (keys[None, :] < last[:, None]) & seen[None, :]
            if LEFT:
                visible = visible & (keys[None, :] >= first[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        elif SOME:
            scores = tl.where(seen[None, :], scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1) * outer)
        reference = new_peak
        if SOME:  # rows that have seen nothing so far
            reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores * outer - reference[:, None])
        shrink = tl.exp2(peak - reference)
        total = total * shrink + tl.sum(weights, 1)
        peak = new_peak
        v_tile = v + position * v_row
        v0 = _load_rows(v_tile, v_offsets, seen, 0, V0, V, SOME)
        weights = weights.to(v0.dtype)
        acc0 = tl.dot(weights, v0, acc0 * shrink[:, None], input_precision="ieee")
        if V1 > 0:
            v1 = _load_rows(v_tile, v_offsets, seen, V0, V1, V, SOME)
            acc1 = tl.dot(weights, v1, acc1 * shrink[:, None], input_precision="ieee")
    return acc0, acc1, total, peak


@triton.jit
def _document(boundaries, document, rows):
    """First row, rows in the tensor, and stated length of one document; rows outside the tensor are left out."""
    start = tl.load(boundaries + document)
    length = tl.load(boundaries + document + 1) - start
    inside = tl.minimum(tl.maximum(start, 0), rows)
    return inside, tl.maximum(tl.minimum(length, rows - inside), 0), length


@triton.jit
def _tile(
    q, k, v, out, lse, cu_q, cu_k, used_q, used_k, keep, keep_q, ends, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, o_batch, o_row, o_head, lse_head, rows_q, rows_k, seen_k, asked_q, shift, left, right,
    heads, group, inner, outer, document, head, block,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Query rows [block * BLOCK_M, + BLOCK_M) of one head of one sample or document; writes each of them once."""
    sample = document
    start_q = 0
    start_k = 0
    if cu_q is not None:
        sample = 0
        start_q, rows_q, length_q = _document(cu_q, document, rows_q)
        start_k, rows_k, length_k = _document(cu_k, document, rows_k)
        shift = length_k - length_q
        asked_q = rows_q
        seen_k = rows_k
    if used_q is not None:
        asked_q = tl.minimum(asked_q, tl.load(used_q + document))
    if keep is not None:
        keep += sample * rows_k.to(tl.int64)
    if used_k is not None:
        seen_k = tl.minimum(seen_k, tl.load(used_k + document))
    q_row = q_row.to(tl.int64) * UNIT
    k_row = k_row.to(tl.int64) * UNIT
    v_row = v_row.to(tl.int64) * UNIT
    o_row = o_row.to(tl.int64) * UNIT
    kv_head = head // group
    top = block * BLOCK_M
    q += (sample * q_batch.to(tl.int64) + head * q_head.to(tl.int64)) * UNIT + (start_q + top) * q_row
    out += (sample * o_batch.to(tl.int64) + head * o_head.to(tl.int64)) * UNIT + (start_q + top) * o_row
    k += (sample * k_batch.to(tl.int64) + kv_head * k_head.to(tl.int64)) * UNIT + start_k * k_row
    v += (sample * v_batch.to(tl.int64) + kv_head * v_head.to(tl.int64)) * UNIT + start_k * v_row

    inside = tl.arange(0, BLOCK_M)
    rows = top + inside
    live = rows < rows_q
    asked = rows < asked_q
    if keep_q is not None:
        asked = asked & (tl.load(keep_q + sample * rows_q.to(tl.int64) + rows, mask=live, other=0) != 0)
    key_rows = tl.arange(0, BLOCK_N)
    if WIDE:
        q_offsets = inside * q_row
        o_offsets = inside * o_row
        k_offsets = key_rows * k_row
        v_offsets = key_rows * v_row
    else:
        q_offsets = inside * q_row.to(tl.int32)
        o_offsets = inside * o_row.to(tl.int32)
        k_offsets = key_rows * k_row.to(tl.int32)
        v_offsets = key_rows * v_row.to(tl.int32)

    # Row i sees keys [first[i], last[i]); the rows of this tile together [low, high), all of them [low_all, high_all).
    bottom = tl.minimum(top + BLOCK_M, asked_q) - 1
    first = tl.zeros([BLOCK_M], tl.int32)
    last = first + seen_k
    low = 0
    low_all = 0
    high = seen_k
    high_all = seen_k
    if ends is not None:
        end = tl.load(ends + sample * rows_q.to(tl.int64) + start_q + rows, mask=asked, other=0) - start_k
        last = tl.minimum(end, seen_k)
        high = tl.max(tl.where(asked, last, 0))
        high_all = tl.min(tl.where(asked, last, seen_k))
    elif RIGHT:
        last = tl.minimum(rows + (shift + right + 1), seen_k)
        high = tl.minimum(bottom + shift + right + 1, seen_k)
        high_all = tl.minimum(top + shift + right + 1, seen_k)
    if LEFT:
        first = rows + (shift - left)
        low = tl.maximum(top + shift - left, 0)
        low_all = tl.maximum(bottom + shift - left, 0)
    high = tl.where(bottom >= top, tl.maximum(high, 0), 0)
    start = low // BLOCK_N * BLOCK_N
    whole = tl.minimum(tl.maximum(high_all, 0), high) // BLOCK_N * BLOCK_N

    q0 = _load_rows(q, q_offsets, asked, 0, D0, D, True)
    if SIGN != 1.0:  # otherwise q is read from shared memory by every product, not through registers
        q0 = (q0.to(tl.float32) * SIGN).to(q0.dtype)
    q1 = q0
    if D1 > 0:
        q1 = _load_rows(q, q_offsets, asked, D0, D1, D, True)
        if SIGN != 1.0:
            q1 = (q1.to(tl.float32) * SIGN).to(q0.dtype)
    acc0 = tl.zeros([BLOCK_M, V0], tl.float32)
    acc1 = acc0
    if V1 > 0:
        acc1 = tl.zeros([BLOCK_M, V1], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = total + float("-inf")
    if LEFT:
        edge = tl.minimum(tl.cdiv(low_all, BLOCK_N) * BLOCK_N, tl.cdiv(high, BLOCK_N) * BLOCK_N)
        acc0, acc1, total, peak = _scan(
            acc0, acc1, total, peak, q0, q1, k, v, k_offsets, v_offsets, k_row, v_row, keep, first, last, low, high,
            start, edge, inner, outer, D, D0, D1, V, V0, V1, BLOCK_N, LEFT, CAPPED, True,
        )  # fmt: skip
        start = tl.maximum(start, edge)
        whole = tl.maximum(whole, start)
    acc0, acc1, total, peak = _scan(
        acc0, acc1, total, peak, q0, q1, k, v, k_offsets, v_offsets, k_row, v_row, keep, first, last, low, high,
        start, whole, inner, outer, D, D0, D1, V, V0, V1, BLOCK_N, False, CAPPED, False,
    )  # fmt: skip
    acc0, acc1, total, peak = _scan(
        acc0, acc1, total, peak, q0, q1, k, v, k_offsets, v_offsets, k_row, v_row, keep, first, last, low, high,
        whole, high, inner, outer, D, D0, D1, V, V0, V1, BLOCK_N, LEFT, CAPPED, True,
    )  # fmt: skip

    answered = asked & (total != 0.0)  # a NaN stays a NaN
    total = tl.where(answered, total, 1.0)
    _store_rows(out, o_offsets, live, tl.where(answered[:, None], acc0 / total[:, None], 0.0), 0, V0, V)
    if V1 > 0:
        _store_rows(out, o_offsets, live, tl.where(answered[:, None], acc1 / total[:, None], 0.0), V0, V1, V)
    if lse is not None:
        lse += (sample * heads + head) * lse_head.to(tl.int64) + start_q
        natural = (peak + tl.log2(total)) * 0.6931471805599453
        tl.store(lse + rows, tl.where(answered, natural, float("-inf")), mask=live)


@triton.jit
def _clear(
    out, lse, row, head, o_row, o_head, lse_head, stop,
    V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr, BLOCK_M: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """0 and LSE -inf in packed rows [row, row + BLOCK_M) that come before `stop`."""
    inside = tl.arange(0, BLOCK_M)
    live = row + inside < stop
    o_row = o_row.to(tl.int64) * UNIT
    out += head * o_head.to(tl.int64) * UNIT + row * o_row
    _store_rows(out, inside * o_row, live, tl.zeros([BLOCK_M, V0], tl.float32), 0, V0, V)
    if V1 > 0:
        _store_rows(out, inside * o_row, live, tl.zeros([BLOCK_M, V1], tl.float32), V0, V1, V)
    if lse is not None:
        lse += head * lse_head.to(tl.int64) + row
        tl.store(lse + inside, tl.zeros([BLOCK_M], tl.float32) + float("-inf"), mask=live)


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_LENGTHS)
def attend_kernel(
    q, k, v, out, lse, cu_q, cu_k, used_q, used_k, keep, keep_q, ends, q_batch, q_row, q_head, k_batch, k_row, k_head,
    v_batch, v_row, v_head, o_batch, o_row, o_head, lse_head, rows_q, rows_k, seen_k, asked_q, shift, left, right,
    heads, group, inner, outer, documents, blocks,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """A tile a program: blocks of rows fastest, then heads, then samples or documents, then the rows behind them.

    Strides count UNIT elements. `cu_q` None: [B,S,H,D], else packed [T,H,D]. `ends` counts from the tensor's first key.
    """
    program = tl.program_id(0)
    block = program % blocks
    head = program // blocks % heads
    document = program // blocks // heads
    if RIGHT:
        block = blocks - 1 - block  # the longest rows first
    if cu_q is not None:
        if document == documents:
            row = tl.minimum(tl.maximum(tl.load(cu_q + documents), 0), rows_q)
            for tail in range(row + block * BLOCK_M, rows_q, blocks * BLOCK_M):
                _clear(out, lse, tail, head, o_row, o_head, lse_head, rows_q, V, V0, V1, BLOCK_M, UNIT)
            return
        _, inside, _ = _document(cu_q, document, rows_q)
        if block * BLOCK_M >= inside:
            return
    _tile(
        q, k, v, out, lse, cu_q, cu_k, used_q, used_k, keep, keep_q, ends,
        q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head, lse_head,
        rows_q, rows_k, seen_k, asked_q, shift, left, right, heads, group, inner, outer, document, head, block,
        D, D0, D1, V, V0, V1, BLOCK_M, BLOCK_N, LEFT, RIGHT, CAPPED, UNIT, WIDE, SIGN,
    )  # fmt: skip


@triton.jit(do_not_specialize=_RUNTIME, do_not_specialize_on_alignment=_LENGTHS)
def marked_kernel(
    q, k, v, out, lse, cu_q, cu_k, used_q, used_k, keep, keep_q, ends, only_if, q_batch, q_row, q_head, k_batch,
    k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head, lse_head, rows_q, rows_k, seen_k, asked_q, shift,
    left, right, heads, group, inner, outer, documents, blocks,
    D: tl.constexpr, D0: tl.constexpr, D1: tl.constexpr, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """As `attend_kernel`, by a few programs that share the tiles of what `only_if` marks, and no others."""
    for document in range(documents):
        if tl.load(only_if + document) != 0:
            for tile in range(tl.program_id(0), blocks * heads, tl.num_programs(0)):
                _tile(
                    q, k, v, out, lse, cu_q, cu_k, used_q, used_k, keep, keep_q, ends,
                    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head, o_batch, o_row, o_head,
                    lse_head, rows_q, rows_k, seen_k, asked_q, shift, left, right, heads, group, inner, outer,
                    document, tile // blocks, tile % blocks,
                    D, D0, D1, V, V0, V1, BLOCK_M, BLOCK_N, LEFT, RIGHT, CAPPED, UNIT, WIDE, SIGN,
                )  # fmt: skip
