"""Triton kernels that quantise to FP8 (e4m3) with a scale per head, in two passes: largest values, then the cast.

A token is cut into vectors ("units") of BLOCK elements, heads and blocks of the head dimension counted as one. A tile
is TOKENS tokens by BESIDE units that lie beside each other; a program goes through several tiles of the same units.
Where it rotates, each vector is multiplied by the Hadamard matrix of +1 and -1, which is exact in any dtype; its
factor BLOCK**-0.5 is left to the scales.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators
from __future__ import annotations

import triton
import triton.language as tl


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
    """(sample, first token, first unit) of a program; programs of the same tokens follow each other."""
    GROUPS: tl.constexpr = UNITS // BESIDE
    block = number // GROUPS
    blocks = (length + SPAN - 1) // SPAN
    sample = block // blocks
    return sample, (block - sample * blocks) * SPAN, (number - block * GROUPS) * BESIDE


@triton.jit
def _programs(batch, length, UNITS: tl.constexpr, BESIDE: tl.constexpr, SPAN: tl.constexpr):
    return batch * ((length + SPAN - 1) // SPAN) * (UNITS // BESIDE)


@triton.jit
def _limit(used, sample, length):
    """Tokens of a sample that count; those behind hold anything."""
    if used is not None:
        return tl.minimum(tl.load(used + sample), length).to(tl.int32)
    return length


@triton.jit
def _load(pointers, mask, matrix, ROTATE: tl.constexpr):
    """Vectors [n,WIDTH] in float32, rotated (without the factor)."""
    value = tl.load(pointers, mask=mask, other=0.0)
    if ROTATE:
        return tl.dot(value, matrix, input_precision="ieee")
    return value.to(tl.float32)


@triton.jit
def _largest_of(
    number, batch, x, batch_stride, row_stride, head_stride, length, used, largest, kv_heads,
    BLOCK: tl.constexpr, UNITS: tl.constexpr, BESIDE: tl.constexpr, TOKENS: tl.constexpr, IN_HEAD: tl.constexpr,
    GROUP: tl.constexpr, ROTATE: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """A program's share of one tensor's largest values, if it has one of that number; how many it has."""
    WIDTH: tl.constexpr = 16 if ROTATE and BLOCK < 16 else BLOCK
    programs = _programs(batch, length, UNITS, BESIDE, TOKENS * LOOPS)
    if (number >= 0) & (number < programs):
        sample, start, unit = _place(number, length, UNITS, BESIDE, TOKENS * LOOPS)
        limit = tl.minimum(_limit(used, sample, length), start + TOKENS * LOOPS)
        vector = tl.arange(0, TOKENS * BESIDE)
        units = unit + vector % BESIDE
        column = tl.arange(0, WIDTH)
        base = sample.to(tl.int64) * batch_stride
        base += (units // IN_HEAD).to(tl.int64) * head_stride + (units % IN_HEAD) * BLOCK
        matrix = _hadamard(x, BLOCK, WIDTH)
        found = tl.zeros([TOKENS * BESIDE], dtype=tl.float32)
        for first in range(start, limit, TOKENS):
            token = first + vector // BESIDE
            mask = (token < limit)[:, None] & (column < BLOCK)[None, :]
            pointers = x + (base + token.to(tl.int64) * row_stride)[:, None] + column[None, :]
            found = tl.maximum(found, tl.max(tl.abs(_load(pointers, mask, matrix, ROTATE)), 1))
        of_unit = tl.max(tl.reshape(found, (TOKENS, BESIDE)), 0)
        head = (unit + tl.arange(0, BESIDE)) // IN_HEAD
        # floats that are not negative are in the order of their bits, and the largest is the same in any order
        tl.atomic_max(largest + sample * kv_heads + head // GROUP, of_unit.to(tl.int32, bitcast=True), sem="relaxed")
    return programs


@triton.jit(do_not_specialize=("batch", "length_q", "length_k"), do_not_specialize_on_alignment=("used_q", "used_k"))
def largest_kernel(
    batch, length_q, length_k, used_q, used_k, largest, kv_heads,
    q, q_batch, q_row, q_head, k, k_batch, k_row, k_head, v, v_batch, v_row, v_head,
    BLOCK: tl.constexpr, IN_HEAD: tl.constexpr, Q_UNITS: tl.constexpr, Q_BESIDE: tl.constexpr, Q_TOKENS: tl.constexpr,
    K_UNITS: tl.constexpr, K_BESIDE: tl.constexpr, K_TOKENS: tl.constexpr,
    V_BLOCK: tl.constexpr, V_IN_HEAD: tl.constexpr, V_UNITS: tl.constexpr, V_BESIDE: tl.constexpr,
    V_TOKENS: tl.constexpr, GROUP: tl.constexpr, ROTATE: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    """largest [3,B,kv_heads] (bits of float32, 0 before) of |q|, |k| and |v|, q and k rotated."""
    number = tl.program_id(0)
    number -= _largest_of(
        number, batch, q, q_batch, q_row, q_head, length_q, used_q, largest, kv_heads,
        BLOCK, Q_UNITS, Q_BESIDE, Q_TOKENS, IN_HEAD, GROUP, ROTATE, LOOPS,
    )  # fmt: skip
    number -= _largest_of(
        number, batch, k, k_batch, k_row, k_head, length_k, used_k, largest + batch * kv_heads, kv_heads,
        BLOCK, K_UNITS, K_BESIDE, K_TOKENS, IN_HEAD, 1, ROTATE, LOOPS,
    )  # fmt: skip
    _largest_of(
        number, batch, v, v_batch, v_row, v_head, length_k, used_k, largest + 2 * batch * kv_heads, kv_heads,
        V_BLOCK, V_UNITS, V_BESIDE, V_TOKENS, V_IN_HEAD, 1, False, LOOPS,
    )  # fmt: skip


@triton.jit
def _cast(
    number, batch, x, out, batch_stride, row_stride, head_stride, length, used, largest, descale, kv_heads,
    BLOCK: tl.constexpr, UNITS: tl.constexpr, BESIDE: tl.constexpr, TOKENS: tl.constexpr, IN_HEAD: tl.constexpr,
    GROUP: tl.constexpr, ROTATE: tl.constexpr, LOOPS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """A program's share of one tensor's cast, if it has one of that number; how many it has."""
    LARGEST: tl.constexpr = 448.0  # of e4m3
    SMALLEST: tl.constexpr = 1e-30  # for a head that is all zeros: nothing is divided by zero
    WIDTH: tl.constexpr = 16 if ROTATE and BLOCK < 16 else BLOCK
    programs = _programs(batch, length, UNITS, BESIDE, TOKENS * LOOPS)
    if (number >= 0) & (number < programs):
        sample, start, unit = _place(number, length, UNITS, BESIDE, TOKENS * LOOPS)
        limit = _limit(used, sample, length)
        vector = tl.arange(0, TOKENS * BESIDE)
        units = unit + vector % BESIDE
        column = tl.arange(0, WIDTH)
        base = sample.to(tl.int64) * batch_stride
        base += (units // IN_HEAD).to(tl.int64) * head_stride + (units % IN_HEAD) * BLOCK
        of_head = sample * kv_heads + (units // IN_HEAD) // GROUP
        amax = tl.maximum(tl.load(largest + of_head).to(tl.float32, bitcast=True), SMALLEST)
        if start == 0:
            tl.store(descale + of_head, amax * (FACTOR / LARGEST), mask=vector < BESIDE)
        scale = (LARGEST / amax)[:, None]
        matrix = _hadamard(x, BLOCK, WIDTH)
        for first in range(start, tl.minimum(length, start + TOKENS * LOOPS), TOKENS):
            token = first + vector // BESIDE
            inside = (column < BLOCK)[None, :]
            pointers = x + (base + token.to(tl.int64) * row_stride)[:, None] + column[None, :]
            value = _load(pointers, (token < limit)[:, None] & inside, matrix, ROTATE) * scale
            row = (sample * length + token).to(tl.int64) * (UNITS * BLOCK) + units * BLOCK
            target = out + row[:, None] + column[None, :]
            tl.store(target, value.to(tl.float8e4nv), mask=(token < length)[:, None] & inside)
    return programs


@triton.jit(do_not_specialize=("batch", "length_q", "length_k"), do_not_specialize_on_alignment=("used_q", "used_k"))
def cast_kernel(
    batch, length_q, length_k, used_q, used_k, largest, descale, kv_heads,
    q, q_out, q_batch, q_row, q_head, k, k_out, k_batch, k_row, k_head, v, v_out, v_batch, v_row, v_head,
    BLOCK: tl.constexpr, IN_HEAD: tl.constexpr, Q_UNITS: tl.constexpr, Q_BESIDE: tl.constexpr, Q_TOKENS: tl.constexpr,
    K_UNITS: tl.constexpr, K_BESIDE: tl.constexpr, K_TOKENS: tl.constexpr,
    V_BLOCK: tl.constexpr, V_IN_HEAD: tl.constexpr, V_UNITS: tl.constexpr, V_BESIDE: tl.constexpr,
    V_TOKENS: tl.constexpr, GROUP: tl.constexpr, ROTATE: tl.constexpr, LOOPS: tl.constexpr, FACTOR: tl.constexpr,
):  # fmt: skip
    """q, k (rotated) and v times 448 / largest, in e4m3; descale [3,B,kv_heads] is what undoes it."""
    number = tl.program_id(0)
    number -= _cast(
        number, batch, q, q_out, q_batch, q_row, q_head, length_q, used_q, largest, descale, kv_heads,
        BLOCK, Q_UNITS, Q_BESIDE, Q_TOKENS, IN_HEAD, GROUP, ROTATE, LOOPS, FACTOR,
    )  # fmt: skip
    of_all = batch * kv_heads
    number -= _cast(
        number, batch, k, k_out, k_batch, k_row, k_head, length_k, used_k, largest + of_all, descale + of_all, kv_heads,
        BLOCK, K_UNITS, K_BESIDE, K_TOKENS, IN_HEAD, 1, ROTATE, LOOPS, FACTOR,
    )  # fmt: skip
    of_all *= 2
    _cast(
        number, batch, v, v_out, v_batch, v_row, v_head, length_k, used_k, largest + of_all, descale + of_all, kv_heads,
        V_BLOCK, V_UNITS, V_BESIDE, V_TOKENS, V_IN_HEAD, 1, False, LOOPS, 1.0,
    )  # fmt: skip
