"""Parts of the kernels of listed blocks: rows in memory, and one step of the running softmax."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_rows(base, offsets, seen, SIZE: tl.constexpr, WIDTH: tl.constexpr, SOME: tl.constexpr):
    """Rows [n, WIDTH] of `base` at `offsets` [n]; 0 past SIZE columns and, where SOME, in rows that are not `seen`."""
    columns = tl.arange(0, WIDTH)
    pointers = base + (offsets[:, None] + columns[None, :])
    if SIZE < WIDTH:
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
def key_rows(
    base, described, order, first, inside, seen, row, line,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, SOME: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rows of the places [first, first + BLOCK_N) of keys or values, `row` elements apart: [BLOCK_N, WIDTH].

    order      None: a place is a row of `base`; else its row is found there
    described  None, or a tensor descriptor whose row `line` is the first place
    """
    if described is not None and not SOME:
        return described.load([line + first, 0])
    elif order is not None:
        rows = tl.load(order + first + inside, mask=seen, other=0) if SOME else tl.load(order + first + inside)
        offsets = rows.to(tl.int64) * row if WIDE else rows * row.to(tl.int32)
        return load_rows(base, offsets, seen, SIZE, WIDTH, SOME)
    else:
        offsets = inside * row if WIDE else inside * row.to(tl.int32)
        return load_rows(base + first.to(tl.int64) * row, offsets, seen, SIZE, WIDTH, SOME)


@triton.jit
def products(q, k):
    """Scores [M, N] of q [M, D] and k [N, D]."""
    return tl.dot(q, tl.trans(k), input_precision="ieee")


@triton.jit
def taken_in(acc, total, peak, scores, v, outer, SOME: tl.constexpr):
    """The running softmax with `scores` [M, N] and their values [N, V] taken in; SOME: scores may be hidden (-inf)."""
    new_peak = tl.maximum(peak, tl.max(scores, 1) * outer)
    reference = new_peak
    if SOME:  # rows that have seen nothing so far
        reference = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores * outer - reference[:, None])
    shrink = tl.exp2(peak - reference)
    total = total * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, new_peak
