"""Triton kernels that quantise to FP8 (e4m3) with a scale per head, in two passes: largest values, then the cast.

A token is cut into vectors ("units") of BLOCK elements, heads and blocks of the head dimension counted as one. A tile
is TOKENS tokens by BESIDE units that lie beside each other; the programs of a sample and some units take turns with
its tiles. Where it rotates, each vector is multiplied by the Hadamard matrix of +1 and -1, which is exact in any
dtype; its factor BLOCK**-0.5 is left to the scales.

A sample is one of a batch, of which `ends` [B] says how many rows count; or, PACKED, a document between two of the
boundaries `ends` [documents + 1], and after them what is left of the `rows`, which counts for nothing.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl

_COUNTS = ("samples", "scales", "length_q", "length_k", "rows_q", "rows_k")
_ENDS = ("ends_q", "ends_k")


@triton.jit
def _hadamard(like, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """Sylvester's matrix [WIDTH,WIDTH]: -1 where the bits that row and column share are odd in number; 0 past BLOCK."""
    place = tl.arange(0, WIDTH)
    bits = place[:, None] & place[None, :]
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits ^= bits >> 1
    sign = 1 - 2 * (bits & 1)
    inside = (place < BLOCK)[:, None] & (place < BLOCK)[None, :]
    return tl.where(inside, sign, 0).to(like.dtype.element_ty)


@triton.jit
def _place(number, length, UNITS: tl.constexpr, BESIDE: tl.constexpr, SPAN: tl.constexpr):
    """(sample, which of its programs, how many they are, first unit); programs of the same tokens follow each other."""
    GROUPS: tl.constexpr = UNITS // BESIDE
    block = number // GROUPS
    blocks = (length + SPAN - 1) // SPAN
    sample = block // blocks
    return sample, block - sample * blocks, blocks, (number - block * GROUPS) * BESIDE


@triton.jit
def _programs(samples, length, UNITS: tl.constexpr, BESIDE: tl.constexpr, SPAN: tl.constexpr):
    return samples * ((length + SPAN - 1) // SPAN) * (UNITS // BESIDE)


@triton.jit
def _extent(sample, scales, length, rows, ends, PACKED: tl.constexpr):
    """(first row, rows, rows that count) of a sample; those that do not count hold anything."""
    if PACKED:
        first = tl.minimum(tl.maximum(tl.load(ends + sample), 0), rows)
        last = tl.load(ends + sample + 1, mask=sample < scales - 1, other=rows)
        held = tl.minimum(tl.maximum(last, first), rows) - first
        return first, held, tl.where(sample < scales - 1, held, 0)
    if ends is not None:
        return 0, length, tl.minimum(tl.load(ends + sample), length).to(tl.int32)
    return 0, length, length


@triton.jit
def _load(pointers, mask, matrix, ROTATE: tl.constexpr):
    """Vectors [n,WIDTH] in float32, rotated (without the factor)."""
    value = tl.load(pointers, mask=mask, other=0.0)
    if ROTATE:
        return tl.dot(value, matrix, input_precision="ieee")
    return value.to(tl.float32)


@triton.jit
def _largest_of(
    number, samples, scales, x, batch_stride, row_stride, head_stride, length, rows, ends, largest, kv_heads,
    BLOCK: tl.constexpr, UNITS: tl.constexpr, BESIDE: tl.constexpr, TOKENS: tl.constexpr, IN_HEAD: tl.constexpr,
    GROUP: tl.constexpr, ROTATE: tl.constexpr, PACKED: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """A program's share of one tensor's largest values, if it has one of that number; how many it has."""
    WIDTH: tl.constexpr = 16 if ROTATE and BLOCK < 16 else BLOCK
    programs = _programs(samples, length, UNITS, BESIDE, TOKENS * LOOPS)
    if (number >= 0) & (number < programs):
        sample, block, blocks, unit = _place(number, length, UNITS, BESIDE, TOKENS * LOOPS)
        start, _, counted = _extent(sample, scales, length, rows, ends, PACKED)
        vector = tl.arange(0, TOKENS * BESIDE)
        units = unit + vector % BESIDE
        column = tl.arange(0, WIDTH)
        base = sample.to(tl.int64) * batch_stride
        base += (units // IN_HEAD).to(tl.int64) * head_stride + (units % IN_HEAD) * BLOCK
        matrix = _hadamard(x, BLOCK, WIDTH)
        found = tl.zeros([TOKENS * BESIDE], dtype=tl.float32)
        for first in range(block * TOKENS, counted, blocks * TOKENS):
            token = first + vector // BESIDE
            mask = (token < counted)[:, None] & (column < BLOCK)[None, :]
            pointers = x + (base + (start + token).to(tl.int64) * row_stride)[:, None] + column[None, :]
            found = tl.maximum(found, tl.max(tl.abs(_load(pointers, mask, matrix, ROTATE)), 1))
        of_unit = tl.max(tl.reshape(found, (TOKENS, BESIDE)), 0)
        head = (unit + tl.arange(0, BESIDE)) // IN_HEAD
        # floats that are not negative are in the order of their bits, and the largest is the same in any order
        tl.atomic_max(largest + sample * kv_heads + head // GROUP, of_unit.to(tl.int32, bitcast=True), sem="relaxed")
    return programs


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_ENDS)
def largest_kernel(
    ends_q, ends_k, largest, q, k, v,
    samples, scales, length_q, length_k, rows_q, rows_k, kv_heads,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    BLOCK: tl.constexpr, IN_HEAD: tl.constexpr, Q_UNITS: tl.constexpr, Q_BESIDE: tl.constexpr, Q_TOKENS: tl.constexpr,
    K_UNITS: tl.constexpr, K_BESIDE: tl.constexpr, K_TOKENS: tl.constexpr,
    V_BLOCK: tl.constexpr, V_IN_HEAD: tl.constexpr, V_UNITS: tl.constexpr, V_BESIDE: tl.constexpr,
    V_TOKENS: tl.constexpr, GROUP: tl.constexpr, ROTATE: tl.constexpr, PACKED: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """largest [3,scales,kv_heads] (bits of float32, 0 before) of |q|, |k| and |v|, q and k rotated."""
    number = tl.program_id(0)
    number -= _largest_of(
        number, samples, scales, q, q_batch, q_row, q_head, length_q, rows_q, ends_q, largest, kv_heads,
        BLOCK, Q_UNITS, Q_BESIDE, Q_TOKENS, IN_HEAD, GROUP, ROTATE, PACKED, LOOPS,
    )  # fmt: skip
    largest += scales * kv_heads
    number -= _largest_of(
        number, samples, scales, k, k_batch, k_row, k_head, length_k, rows_k, ends_k, largest, kv_heads,
        BLOCK, K_UNITS, K_BESIDE, K_TOKENS, IN_HEAD, 1, ROTATE, PACKED, LOOPS,
    )  # fmt: skip
    largest += scales * kv_heads
    _largest_of(
        number, samples, scales, v, v_batch, v_row, v_head, length_k, rows_k, ends_k, largest, kv_heads,
        V_BLOCK, V_UNITS, V_BESIDE, V_TOKENS, V_IN_HEAD, 1, False, PACKED, LOOPS,
    )  # fmt: skip


@triton.jit
def _cast(
    number, samples, scales, x, out, batch_stride, row_stride, head_stride, length, rows, ends, largest, descale,
    kv_heads,
    BLOCK: tl.constexpr, UNITS: tl.constexpr, BESIDE: tl.constexpr, TOKENS: tl.constexpr, IN_HEAD: tl.constexpr,
    GROUP: tl.constexpr, ROTATE: tl.constexpr, PACKED: tl.constexpr, LOOPS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """A program's share of one tensor's cast, if it has one of that number; how many it has."""
    LARGEST: tl.constexpr = 448.0  # of e4m3
    SMALLEST: tl.constexpr = 1e-30  # for a head that is all zeros: nothing is divided by zero
    WIDTH: tl.constexpr = 16 if ROTATE and BLOCK < 16 else BLOCK
    programs = _programs(samples, length, UNITS, BESIDE, TOKENS * LOOPS)
    if (number >= 0) & (number < programs):
        sample, block, blocks, unit = _place(number, length, UNITS, BESIDE, TOKENS * LOOPS)
        start, held, counted = _extent(sample, scales, length, rows, ends, PACKED)
        vector = tl.arange(0, TOKENS * BESIDE)
        units = unit + vector % BESIDE
        column = tl.arange(0, WIDTH)
        base = sample.to(tl.int64) * batch_stride
        base += (units // IN_HEAD).to(tl.int64) * head_stride + (units % IN_HEAD) * BLOCK
        of_head = sample * kv_heads + (units // IN_HEAD) // GROUP
        amax = tl.maximum(tl.load(largest + of_head).to(tl.float32, bitcast=True), SMALLEST)
        if block == 0:
            tl.store(descale + of_head, amax * (FACTOR / LARGEST), mask=vector < BESIDE)
        scale = (LARGEST / amax)[:, None]
        matrix = _hadamard(x, BLOCK, WIDTH)
        written = start.to(tl.int64) if PACKED else sample.to(tl.int64) * length
        for first in range(block * TOKENS, held, blocks * TOKENS):
            token = first + vector // BESIDE
            inside = (column < BLOCK)[None, :]
            pointers = x + (base + (start + token).to(tl.int64) * row_stride)[:, None] + column[None, :]
            value = _load(pointers, (token < counted)[:, None] & inside, matrix, ROTATE) * scale
            target = out + ((written + token) * (UNITS * BLOCK) + units * BLOCK)[:, None] + column[None, :]
            tl.store(target, value.to(tl.float8e4nv), mask=(token < held)[:, None] & inside)
    return programs


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_ENDS)
def cast_kernel(
    ends_q, ends_k, largest, descale, q, k, v, q_out, k_out, v_out,
    samples, scales, length_q, length_k, rows_q, rows_k, kv_heads,
    q_batch, q_row, q_head, k_batch, k_row, k_head, v_batch, v_row, v_head,
    BLOCK: tl.constexpr, IN_HEAD: tl.constexpr, Q_UNITS: tl.constexpr, Q_BESIDE: tl.constexpr, Q_TOKENS: tl.constexpr,
    K_UNITS: tl.constexpr, K_BESIDE: tl.constexpr, K_TOKENS: tl.constexpr,
    V_BLOCK: tl.constexpr, V_IN_HEAD: tl.constexpr, V_UNITS: tl.constexpr, V_BESIDE: tl.constexpr,
    V_TOKENS: tl.constexpr, GROUP: tl.constexpr, ROTATE: tl.constexpr, PACKED: tl.constexpr, LOOPS: tl.constexpr,
    FACTOR: tl.constexpr,
):  # fmt: skip
    """q, k (rotated) and v times 448 / largest, in e4m3; descale [3,scales,kv_heads] is what undoes it."""
    number = tl.program_id(0)
    number -= _cast(
        number, samples, scales, q, q_out, q_batch, q_row, q_head, length_q, rows_q, ends_q, largest, descale, kv_heads,
        BLOCK, Q_UNITS, Q_BESIDE, Q_TOKENS, IN_HEAD, GROUP, ROTATE, PACKED, LOOPS, FACTOR,
    )  # fmt: skip
    largest += scales * kv_heads
    descale += scales * kv_heads
    number -= _cast(
        number, samples, scales, k, k_out, k_batch, k_row, k_head, length_k, rows_k, ends_k, largest, descale, kv_heads,
        BLOCK, K_UNITS, K_BESIDE, K_TOKENS, IN_HEAD, 1, ROTATE, PACKED, LOOPS, FACTOR,
    )  # fmt: skip
    largest += scales * kv_heads
    descale += scales * kv_heads
    _cast(
        number, samples, scales, v, v_out, v_batch, v_row, v_head, length_k, rows_k, ends_k, largest, descale, kv_heads,
        V_BLOCK, V_UNITS, V_BESIDE, V_TOKENS, V_IN_HEAD, 1, False, PACKED, LOOPS, 1.0,
    )  # fmt: skip
