"""Parts of the kernel of attention over pages: a program's rows, what they see, and tiles of keys and values."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from polyattn.kernels.softcap_parts import bent


@triton.jit
def packed_row(tile, q_lengths, step, batch, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """(row, its first token, the tile's place in it) of packed queries; row == batch: the tokens after the last row."""
    row = 0
    first = 0
    passed = 0
    before = 0
    for start in range(0, batch, 128):
        rows = start + tl.arange(0, 128)
        lengths = tl.maximum(tl.load(q_lengths + rows * step, mask=rows < batch, other=0), 0)
        tiles = (lengths * GROUP + (ROWS - 1)) // ROWS
        done = (before + tl.cumsum(tiles, 0) <= tile) & (rows < batch)
        row += tl.sum(tl.where(done, 1, 0), 0)
        first += tl.sum(tl.where(done, lengths, 0), 0)
        passed += tl.sum(tl.where(done, tiles, 0), 0)
        before += tl.sum(tiles, 0)
    return row, first, tile - passed


@triton.jit
def seen_keys(
    query, asked, shift, limit, left, right, ends, ends_width,
    CAUSAL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Keys [low, high) that a query, or each of several, sees; both grow with it. Where `asked` is false: anything."""
    low = query * 0
    high = low + limit
    if CAUSAL:
        high = tl.minimum(high, query + (shift + 1))
    if RIGHT:
        high = tl.minimum(high, query + (shift + right + 1))
    if LEFT:
        low = tl.maximum(query + (shift - left), 0)
    if ends is not None:
        at = query + shift
        high = tl.minimum(high, tl.load(ends + at, mask=(at >= 0) & (at < ends_width) & asked, other=0))
    return low, high


@triton.jit
def all_exist(table, step, begin, stop, pages, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Whether every entry of the block table for the tiles [begin, stop) of keys names a page."""
    first = begin * BLOCK_N // PAGE
    behind = tl.where(begin < stop, (stop * BLOCK_N + (PAGE - 1)) // PAGE, first)
    lost = 0
    for start in range(first, behind, 256):
        at = start + tl.arange(0, 256)
        entry = tl.load(table + at * step, mask=at < behind, other=0)
        lost += tl.sum(tl.where((entry < 0) | (entry >= pages), 1, 0), 0)
    return lost == 0


@triton.jit
def entries(table, step, tile, stop, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """The block table's entries for a tile of keys: one, or one a key; 0 for keys from `stop` on."""
    if PAGE % BLOCK_N == 0:
        return tl.load(table + tile // (PAGE // BLOCK_N) * step, mask=tile * BLOCK_N < stop, other=0)
    else:
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        return tl.load(table + keys // PAGE * step, mask=keys < stop, other=0)


@triton.jit
def page_rows(
    pool, page, page_stride, slot_stride, tile, keep,
    PAGE: tl.constexpr, BLOCK_N: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_STEP: tl.constexpr,
    UNIT: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A tile's rows [BLOCK_N, BLOCK_D] of one head's pool; 0 past DIM and where `keep` [BLOCK_N], if any, is false."""
    places = tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_D)
    if WIDE:
        page = page.to(tl.int64)
        places = places.to(tl.int64)
    if PAGE % BLOCK_N == 0:
        pool += (page.to(tl.int64) * page_stride + tile % (PAGE // BLOCK_N) * BLOCK_N * slot_stride) * UNIT
        rows = places * slot_stride
    elif BLOCK_N % PAGE == 0:
        rows = page * page_stride + places % PAGE * slot_stride
    else:
        rows = page * page_stride + (tile * BLOCK_N + places) % PAGE * slot_stride
    pointers = pool + ((rows * UNIT)[:, None] + (columns * DIM_STEP)[None, :])
    if keep is not None:
        if DIM < BLOCK_D:
            return tl.load(pointers, mask=keep[:, None] & (columns < DIM)[None, :], other=0.0)
        else:
            return tl.load(pointers, mask=keep[:, None], other=0.0)
    elif DIM < BLOCK_D:
        return tl.load(pointers, mask=(columns < DIM)[None, :], other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def scored(q_tile, k_tile, factor, cap, CAPPED: tl.constexpr):
    """Scores [rows, keys] before the factor of the exponent."""
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
    if CAPPED > 0:
        scores = cap * bent(scores * factor, CAPPED)
    return scores


@triton.jit
def taken_in(scores, v_tile, peak, total, acc, visible, scale):
    """peak, total [rows] and acc [rows, D_v] with a tile of keys; `visible` [rows, keys], or None: all are."""
    if visible is not None:
        scores = tl.where(visible, scores * scale, float("-inf"))
        scale = 1.0
    new_peak = tl.maximum(peak, tl.max(scores, 1) * scale)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * scale - base[:, None])
    fade = tl.exp2(peak - base)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * fade[:, None], input_precision="ieee")
    return new_peak, total, acc
