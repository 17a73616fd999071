"""Triton kernels of attention over pages: query tiles against splits of the keys, and putting splits together.

One program takes a tile of query rows, one KV head, and one split of the keys that those rows see. The query heads that
share the KV head are rows of the same tile, so that its keys are read once for all of them.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

_LENGTHS = (
    "batch", "tokens", "tiles_a_row", "max_pages", "pages", "left", "right", "ends_width",
    "q_batch", "q_token", "q_head", "k_page", "k_slot", "k_head", "v_page", "v_slot", "v_head",
    "out_batch", "out_token", "out_head", "table_row", "table_entry", "kv_lengths_step", "q_lengths_step",
)  # fmt: skip


@triton.jit
def _packed_row(tile, q_lengths, step, batch, GROUP: tl.constexpr, BLOCK_M: tl.constexpr):
    """(row, its first token, the tile's place in it) of packed queries; row == batch: the tokens after the last row."""
    row = 0
    first = 0
    passed = 0
    before = 0
    for start in range(0, batch, 128):
        rows = start + tl.arange(0, 128)
        lengths = tl.maximum(tl.load(q_lengths + rows * step, mask=rows < batch, other=0), 0)
        tiles = (lengths * GROUP + (BLOCK_M - 1)) // BLOCK_M
        done = (before + tl.cumsum(tiles, 0) <= tile) & (rows < batch)
        row += tl.sum(tl.where(done, 1, 0), 0)
        first += tl.sum(tl.where(done, lengths, 0), 0)
        passed += tl.sum(tl.where(done, tiles, 0), 0)
        before += tl.sum(tiles, 0)
    return row, first, tile - passed


@triton.jit
def _entries(table, step, tile, stop, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block table's entries for a tile of keys: one, or one a key; -1 for keys from `stop` on."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table + tile // (PAGE // BLOCK_N) * step, mask=tile * BLOCK_N < stop, other=-1)
    else:
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + keys // PAGE * step, mask=keys < stop, other=-1)


@triton.jit
def _page_rows(
    pool, page, page_stride, slot_stride, tile, keep,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_STEP: tl.constexpr,
):  # fmt: skip
    """A tile's rows [BLOCK_N, BLOCK_D] of one head's pool; 0 past DIM and where `keep` (a key's, or all's) is false."""
    places = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    base = pool + page.to(tl.int64) * page_stride
    if PAGE % BLOCK_N == 0:
        base += slot_stride * (tile % (PAGE // BLOCK_N) * BLOCK_N)
        rows = base + places.to(tl.int64) * slot_stride
    elif BLOCK_N % PAGE == 0:
        rows = base + (places % PAGE).to(tl.int64) * slot_stride
    else:
        rows = base + ((tile * BLOCK_N + places) % PAGE).to(tl.int64) * slot_stride
    mask = tl.where(keep, places, -1) >= 0
    pointers = rows[:, None] + (columns * DIM_STEP)[None, :]
    if DIM < BLOCK_D:
        return tl.load(pointers, mask=mask[:, None] & (columns < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers, mask=mask[:, None], other=0.0)


@triton.jit
def _capped(scores, factor, cap, EXACT: tl.constexpr):
    """cap * tanh(scores * factor); EXACT keeps the digits of small scores, too."""
    x = scores * factor
    bent = 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0)
    if EXACT:
        square = x * x
        series = x * (1.0 - square * (0.3333333333 - square * (0.1333333333 - square * 0.0539682540)))
        bent = tl.where(square < 0.01, series, bent)
    return cap * bent


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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid: tiles of query rows, KV heads, splits of the keys.

    tokens   packed queries in all, else queries a row; strides count UNIT elements
    factor   scores become powers of two by it; where CAPPED, cap * tanh(scores * factor) does
    ends     None, or [batch, ends_width]: the query at position p sees keys before ends[p]
    part     None, or float32 [splits, all tokens, heads, V_DIM] beside part_lse (base two), for `combine_splits_kernel`
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    heads = tl.num_programs(1) * GROUP
    if PACKED:
        row, first, place = _packed_row(tile, q_lengths, q_lengths_step, batch, GROUP, BLOCK_M)
        length = tl.load(q_lengths + row * q_lengths_step, mask=row < batch, other=tokens)
        writes = tl.minimum(length, tokens - first)
        q_start = first.to(tl.int64) * q_token
        out_start = first.to(tl.int64) * out_token
        lse_start = first
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

    # rows of the tile: query by query, the heads of the group side by side
    places = place * BLOCK_M + tl.arange(0, BLOCK_M)
    query = places // GROUP
    head = kv_head * GROUP + places % GROUP
    written = query < writes
    live = written & (query < length)

    # a query sees keys [low, high), which grow with it: the tile's first and last query tell which tiles are whole
    shift = kv_length - length
    limit = tl.minimum(kv_length, max_pages * PAGE)
    first_query = place * BLOCK_M // GROUP
    last_query = tl.minimum((place * BLOCK_M + (BLOCK_M - 1)) // GROUP, tl.minimum(length, writes) - 1)
    low = tl.zeros([BLOCK_M], tl.int32)
    high = low + limit
    low_first = 0
    low_last = 0
    high_first = limit
    high_last = limit
    if CAUSAL:
        high = tl.minimum(high, query + (shift + 1))
        high_first = tl.minimum(high_first, first_query + shift + 1)
        high_last = tl.minimum(high_last, last_query + shift + 1)
    if RIGHT:
        high = tl.minimum(high, query + (shift + right + 1))
        high_first = tl.minimum(high_first, first_query + shift + right + 1)
        high_last = tl.minimum(high_last, last_query + shift + right + 1)
    if LEFT:
        low = tl.maximum(query + (shift - left), 0)
        low_first = tl.maximum(first_query + shift - left, 0)
        low_last = tl.maximum(last_query + shift - left, 0)
    if ends is not None:
        ends += row.to(tl.int64) * ends_width
        ends_width = tl.where(row < batch, ends_width, 0)
        at = query + shift
        high = tl.minimum(high, tl.load(ends + at, mask=live & (at >= 0) & (at < ends_width), other=0))
        at_first = first_query + shift
        at_last = last_query + shift
        end = tl.load(ends + at_first, mask=(at_first >= 0) & (at_first < ends_width), other=0)
        high_first = tl.minimum(high_first, end)
        end = tl.load(ends + at_last, mask=(at_last >= 0) & (at_last < ends_width), other=0)
        high_last = tl.minimum(high_last, end)
    high_last = tl.where(last_query >= first_query, high_last, 0)
    low_tile = low_first // BLOCK_N
    tiles = tl.maximum((tl.maximum(high_last, 0) + (BLOCK_N - 1)) // BLOCK_N - low_tile, 0)
    begin = low_tile + tiles * split // splits
    stop = low_tile + tiles * (split + 1) // splits
    whole_begin = tl.maximum((low_last + (BLOCK_N - 1)) // BLOCK_N, begin)
    whole_stop = tl.minimum(tl.maximum(high_first, 0) // BLOCK_N, stop)
    whole_begin = tl.where(whole_begin < whole_stop, whole_begin, stop)
    whole_stop = tl.maximum(whole_begin, whole_stop)

    k_page = k_page.to(tl.int64) * UNIT
    v_page = v_page.to(tl.int64) * UNIT
    k_slot = k_slot.to(tl.int64) * UNIT
    v_slot = v_slot.to(tl.int64) * UNIT
    k += kv_head.to(tl.int64) * k_head * UNIT
    v += kv_head.to(tl.int64) * v_head * UNIT
    dims = tl.arange(0, BLOCK_D)
    q_rows = (q_start + query.to(tl.int64) * q_token + head.to(tl.int64) * q_head) * UNIT
    q_tile = tl.load(
        q + q_rows[:, None] + (dims * Q_STEP)[None, :], mask=live[:, None] & (dims < DIM)[None, :], other=0.0
    )
    # by a factor that is not negative, the largest product gives the largest score
    q_tile = tl.where(factor < 0.0, -q_tile, q_tile)
    factor = tl.abs(factor)
    scale = factor
    if CAPPED:
        scale = 1.0

    peak = tl.zeros([BLOCK_M], tl.float32) + float("-inf")
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    # tiles that every row sees whole: only an entry that names no page hides keys there
    entry = _entries(table, table_entry, whole_begin, whole_stop * BLOCK_N, PAGE, BLOCK_N)
    for at in range(whole_begin, whole_stop):
        exists = (entry >= 0) & (entry < pages)
        page = tl.where(exists, entry, 0)
        hidden = tl.where(exists, 0.0, float("-inf"))
        entry = _entries(table, table_entry, at + 1, whole_stop * BLOCK_N, PAGE, BLOCK_N)
        k_tile = _page_rows(k, page, k_page, k_slot, at, exists, PAGE, BLOCK_N, DIM, BLOCK_D, K_STEP)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if CAPPED:
            scores = _capped(scores, factor, cap, k.dtype.element_ty == tl.float32)
        if PAGE % BLOCK_N == 0:
            new_peak = tl.maximum(peak, tl.max(scores, 1) * scale + hidden)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores * scale + (hidden - base)[:, None])
        else:
            scores = scores * scale + hidden[None, :]
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        v_tile = _page_rows(v, page, v_page, v_slot, at, exists, PAGE, BLOCK_N, V_DIM, BLOCK_V, V_STEP)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision="ieee")
        peak = new_peak

    # tiles that some row sees a part of, before and behind those
    before = whole_begin - begin
    for edge in tl.range(before + stop - whole_stop, num_stages=1):  # few, and their loads depend on each other
        at = tl.where(edge < before, begin + edge, whole_stop + edge - before)
        keys = at * BLOCK_N + tl.arange(0, BLOCK_N)
        entry = _entries(table, table_entry, at, limit, PAGE, BLOCK_N)
        exists = (entry >= 0) & (entry < pages)
        page = tl.where(exists, entry, 0)
        keep = (keys >= low_first) & (keys < tl.where(exists, high_last, 0))
        k_tile = _page_rows(k, page, k_page, k_slot, at, keep, PAGE, BLOCK_N, DIM, BLOCK_D, K_STEP)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        if CAPPED:
            scores = _capped(scores, factor, cap, k.dtype.element_ty == tl.float32)
        visible = keep[None, :] & (keys[None, :] < high[:, None])
        if LEFT:
            visible = visible & (keys[None, :] >= low[:, None])
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        total = total * fade + tl.sum(weights, 1)
        v_tile = _page_rows(v, page, v_page, v_slot, at, keep, PAGE, BLOCK_N, V_DIM, BLOCK_V, V_STEP)
        acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision="ieee")
        peak = new_peak

    answered = live & (total != 0.0)  # a NaN stays a NaN
    total = tl.where(answered, total, 1.0)
    acc = tl.where(answered[:, None], acc / total[:, None], 0.0)
    log = tl.where(answered, peak + tl.log2(total), float("-inf"))
    columns = tl.arange(0, BLOCK_V)
    stores = written[:, None] & (columns < V_DIM)[None, :]
    if part is not None:
        places = (split.to(tl.int64) * all_tokens + token + query) * heads + head
        tl.store(part_lse + places, log, mask=written)
        if begin < stop:
            tl.store(part + (places * V_DIM)[:, None] + columns[None, :], acc, mask=stores)
    else:
        rows = (out_start + query.to(tl.int64) * out_token + head.to(tl.int64) * out_head) * UNIT
        tl.store(out + rows[:, None] + (columns * OUT_STEP)[None, :], acc.to(out.dtype.element_ty), mask=stores)
        if lse is not None:
            places = lse_start + head.to(tl.int64) * tokens + query
            tl.store(lse + places, log * 0.6931471805599453, mask=written)


@triton.jit(
    do_not_specialize=(
        "splits", "all_tokens", "tokens", "heads", "out_batch", "out_token", "out_head",
    )
)  # fmt: skip
def combine_splits_kernel(
    part, part_lse, out, lse, splits, all_tokens, tokens, heads,
    out_batch, out_token, out_head,
    V_DIM: tl.constexpr, UNIT: tl.constexpr, OUT_STEP: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """part [splits, all_tokens, heads, V_DIM] by its LSE (base two) to out, `tokens` a sample, and to lse (natural).

    A split that saw no key has LSE -inf, and its part is not read.
    """
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.arange(0, BLOCK_V)
    inside = rows < all_tokens.to(tl.int64) * heads
    step = all_tokens.to(tl.int64) * heads
    stop = step * splits
    peak = tl.zeros([BLOCK_R], tl.float32) + float("-inf")
    total = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_V], tl.float32)
    for start in range(0, splits, AHEAD):
        for ahead in tl.static_range(AHEAD):
            place = (start + ahead) * step + rows
            log = tl.load(part_lse + place, mask=inside & (place < stop), other=float("-inf"))
            new_peak = tl.maximum(peak, log)
            base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            fade = tl.exp2(peak - base)
            weight = tl.exp2(log - base)
            seen = (log != float("-inf"))[:, None] & (columns < V_DIM)[None, :]
            values = tl.load(part + (place * V_DIM)[:, None] + columns[None, :], mask=seen, other=0.0)
            acc = acc * fade[:, None] + values * weight[:, None]
            total = total * fade + weight
            peak = new_peak
    answered = total != 0.0
    total = tl.where(answered, total, 1.0)
    acc = tl.where(answered[:, None], acc / total[:, None], 0.0)
    token = rows // heads
    head = rows % heads
    sample = token // tokens
    query = token % tokens
    places = (sample * out_batch + query * out_token + head * out_head) * UNIT
    stores = inside[:, None] & (columns < V_DIM)[None, :]
    tl.store(out + places[:, None] + (columns * OUT_STEP)[None, :], acc.to(out.dtype.element_ty), mask=stores)
    if lse is not None:
        log = tl.where(answered, (peak + tl.log2(total)) * 0.6931471805599453, float("-inf"))
        tl.store(lse + (sample * heads + head) * tokens + query, log, mask=inside)
