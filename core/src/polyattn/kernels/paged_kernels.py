"""The Triton kernel of attention over pages: rows of queries against a split of the keys.

One program takes rows of queries, one KV head, and one split of the keys that those rows see. The query heads that
share the KV head are rows of the same program, so that its keys are read once for all of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from polyattn.kernels.paged_parts import all_exist, entries, packed_row, page_rows, scored, seen_keys, taken_in

_LENGTHS = (
    "batch", "tokens", "tiles_a_row", "max_pages", "pages", "left", "right", "ends_width",
    "q_batch", "q_token", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head",
    "out_batch", "out_token", "out_head", "table_row", "table_entry", "kv_lengths_step", "q_lengths_step",
)  # fmt: skip


@triton.jit
def _queries(
    q, q_start, q_token, q_head, kv_head, place, length, writes,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, Q_STEP: tl.constexpr, UNIT: tl.constexpr,
    NEGATIVE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Rows from `place` on, query by query, the heads of the group side by side: query, head, live, q [BLOCK_M, D]."""
    places = place + tl.arange(0, BLOCK_M)
    query = places // GROUP
    head = kv_head * GROUP + places % GROUP
    live = (query < writes) & (query < length)
    dims = tl.arange(0, BLOCK_D)
    rows = (q_start + query.to(tl.int64) * q_token + head.to(tl.int64) * q_head) * UNIT
    mask = live[:, None] & (dims < DIM)[None, :]
    q_tile = tl.load(q + rows[:, None] + (dims * Q_STEP)[None, :], mask=mask, other=0.0)
    if NEGATIVE:  # by a factor that is not negative, the largest product gives the largest score
        q_tile = -q_tile
    return query, head, live, q_tile


@triton.jit
def _write(
    out, lse, part, part_lse, query, head, live, peak, total, acc, writes, any_key,
    split, all_tokens, token, tokens, heads, out_start, out_token, out_head, lse_start,
    V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, OUT_STEP: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Results of a tile of rows, or its part of them."""
    written = query < writes
    answered = live & (total != 0.0)  # a NaN stays a NaN
    total = tl.where(answered, total, 1.0)
    acc = tl.where(answered[:, None], acc / total[:, None], 0.0)
    log = tl.where(answered, peak + tl.log2(total), float("-inf"))
    columns = tl.arange(0, BLOCK_V)
    stores = written[:, None] & (columns < V_DIM)[None, :]
    if part is not None:
        places = (split.to(tl.int64) * all_tokens + token + query) * heads + head
        tl.store(part_lse + places, log, mask=written)
        if any_key:
            tl.store(part + (places * V_DIM)[:, None] + columns[None, :], acc, mask=stores)
    else:
        rows = (out_start + query.to(tl.int64) * out_token + head.to(tl.int64) * out_head) * UNIT
        tl.store(out + rows[:, None] + (columns * OUT_STEP)[None, :], acc.to(out.dtype.element_ty), mask=stores)
        if lse is not None:
            places = lse_start + head.to(tl.int64) * tokens + query
            tl.store(lse + places, log * 0.6931471805599453, mask=written)


@triton.jit(
    do_not_specialize=_LENGTHS,
    do_not_specialize_on_alignment=("block_table", "kv_lengths", "q_lengths", "ends"),
)
def paged_attention_kernel(
    q, k, v, out, lse, part, part_lse,
    block_table, kv_lengths, q_lengths, ends,
    q_batch, q_token, q_head, k_page, k_slot, k_head, v_page, v_slot,
    v_head, out_batch, out_token, out_head,
    table_row, table_entry, kv_lengths_step, q_lengths_step,
    batch, tokens, tiles_a_row, max_pages, pages, left, right, ends_width,
    factor, cap,
    GROUP: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr, PAGE: tl.constexpr, UNIT: tl.constexpr,
    Q_STEP: tl.constexpr, K_STEP: tl.constexpr, V_STEP: tl.constexpr, OUT_STEP: tl.constexpr,
    PACKED: tl.constexpr, CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, CAPPED: tl.constexpr,
    NEGATIVE: tl.constexpr, ALIKE: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of query rows, KV heads, splits of the keys.

    tokens   packed queries in all, else queries a row; strides count UNIT elements
    factor   not negative: scores (of -q where NEGATIVE) become powers of two by it; where CAPPED > 0,
             cap * tanh(scores * factor) does
    ends     None, or [batch, ends_width]: the query at position p sees keys before ends[p]
    part     None, or float32 [splits, all tokens, heads, V_DIM] beside part_lse (base two), for `combine_splits_kernel`
    ALIKE    k and v have the same strides; WIDE: they are larger than offsets of 32 bits
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    heads = tl.num_programs(1) * GROUP
    if PACKED:
        row, first, place = packed_row(tile, q_lengths, q_lengths_step, batch, GROUP, BLOCK_M)
        length = tl.load(q_lengths + row * q_lengths_step, mask=row < batch, other=tokens)
        writes = tl.minimum(length, tokens - first)
        q_start = first.to(tl.int64) * q_token
        out_start = first.to(tl.int64) * out_token
        lse_start = first.to(tl.int64)
        all_tokens = tokens
        token = first.to(tl.int64)
    else:
        row = tile // tiles_a_row
        place = tile % tiles_a_row
        length = tokens
        if q_lengths is not None:
            length = tl.minimum(tl.load(q_lengths + row * q_lengths_step), tokens)
        writes = tokens
        q_start = row.to(tl.int64) * q_batch
        out_start = row.to(tl.int64) * out_batch
        lse_start = row.to(tl.int64) * heads * tokens
        all_tokens = batch * tokens
        token = row.to(tl.int64) * tokens
    kv_length = tl.load(kv_lengths + row * kv_lengths_step, mask=row < batch, other=0)
    table = block_table + row.to(tl.int64) * table_row
    place *= BLOCK_M
    query, head, live, q_tile = _queries(
        q, q_start, q_token, q_head, kv_head, place, length, writes,
        GROUP, DIM, BLOCK_D, Q_STEP, UNIT, NEGATIVE, BLOCK_M,
    )  # fmt: skip

    # a query sees keys [low, high), which grow with it: the first and last query tell which tiles are whole
    shift = kv_length - length
    limit = tl.minimum(kv_length, max_pages * PAGE)
    first_query = place // GROUP
    last_query = tl.minimum((place + (BLOCK_M - 1)) // GROUP, tl.minimum(length, writes) - 1)
    if ends is not None:
        ends += row.to(tl.int64) * ends_width
        ends_width = tl.where(row < batch, ends_width, 0)
    low_first, high_first = seen_keys(
        first_query, True, shift, limit, left, right, ends, ends_width, CAUSAL, LEFT, RIGHT
    )  # fmt: skip
    low_last, high_last = seen_keys(last_query, True, shift, limit, left, right, ends, ends_width, CAUSAL, LEFT, RIGHT)
    high_last = tl.where(last_query >= first_query, high_last, 0)
    low_tile = low_first // BLOCK_N
    tiles = tl.maximum((tl.maximum(high_last, 0) + (BLOCK_N - 1)) // BLOCK_N - low_tile, 0)
    begin = low_tile + tiles * split // splits
    stop = low_tile + tiles * (split + 1) // splits
    whole_begin = tl.maximum((low_last + (BLOCK_N - 1)) // BLOCK_N, begin)
    whole_stop = tl.minimum(tl.maximum(high_first, 0) // BLOCK_N, stop)
    whole_begin = tl.where(whole_begin < whole_stop, whole_begin, stop)
    whole_stop = tl.maximum(whole_begin, whole_stop)
    exist = all_exist(table, table_entry, whole_begin, whole_stop, pages, PAGE, BLOCK_N)
    whole_stop = tl.where(exist, whole_stop, whole_begin)

    if ALIKE:
        v_page = k_page
        v_slot = k_slot
    if WIDE:
        k_page = k_page.to(tl.int64)
        v_page = v_page.to(tl.int64)
        k_slot = k_slot.to(tl.int64)
        v_slot = v_slot.to(tl.int64)
    k += kv_head.to(tl.int64) * k_head * UNIT
    v += kv_head.to(tl.int64) * v_head * UNIT
    scale = factor
    if CAPPED > 0:
        scale = 1.0
    peak = tl.zeros([BLOCK_M], tl.float32) + float("-inf")
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    # tiles that every row sees whole; where the next one lies is read while this one is computed
    page = entries(table, table_entry, whole_begin, whole_stop * BLOCK_N, PAGE, BLOCK_N)
    for at in range(whole_begin, whole_stop):
        this = page
        page = entries(table, table_entry, at + 1, whole_stop * BLOCK_N, PAGE, BLOCK_N)
        k_tile = page_rows(k, this, k_page, k_slot, at, None, PAGE, BLOCK_N, DIM, BLOCK_D, K_STEP, UNIT, WIDE)
        scores = scored(q_tile, k_tile, factor, cap, CAPPED)
        v_tile = page_rows(v, this, v_page, v_slot, at, None, PAGE, BLOCK_N, V_DIM, BLOCK_V, V_STEP, UNIT, WIDE)
        peak, total, acc = taken_in(scores, v_tile, peak, total, acc, None, scale)

    # tiles that some row sees a part of, before and behind those; all of them where an entry names no page
    low, high = seen_keys(query, live, shift, limit, left, right, ends, ends_width, CAUSAL, LEFT, RIGHT)
    before = whole_begin - begin
    for edge in tl.range(before + stop - whole_stop, num_stages=1):  # few, and their loads depend on each other
        at = tl.where(edge < before, begin + edge, whole_stop + edge - before)
        keys = at * BLOCK_N + tl.arange(0, BLOCK_N)
        page = entries(table, table_entry, at, limit, PAGE, BLOCK_N)
        exists = (page >= 0) & (page < pages)
        page = tl.where(exists, page, 0)
        keep = (keys >= low_first) & (keys < tl.where(exists, high_last, 0))
        k_tile = page_rows(k, page, k_page, k_slot, at, keep, PAGE, BLOCK_N, DIM, BLOCK_D, K_STEP, UNIT, WIDE)
        v_tile = page_rows(v, page, v_page, v_slot, at, keep, PAGE, BLOCK_N, V_DIM, BLOCK_V, V_STEP, UNIT, WIDE)
        visible = keep[None, :] & (keys[None, :] >= low[:, None]) & (keys[None, :] < high[:, None])
        scores = scored(q_tile, k_tile, factor, cap, CAPPED)
        peak, total, acc = taken_in(scores, v_tile, peak, total, acc, visible, scale)

    _write(
        out, lse, part, part_lse, query, head, live, peak, total, acc, writes, begin < stop,
        split, all_tokens, token, tokens, heads, out_start, out_token, out_head, lse_start,
        V_DIM, BLOCK_V, OUT_STEP, UNIT,
    )  # fmt: skip
