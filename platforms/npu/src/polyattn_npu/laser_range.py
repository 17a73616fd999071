"""What float16 scores ask of `npu:laser`'s inputs: the rows between which it runs, and what they are divided by.

The op stores unscaled scores in float16: one beyond 65504 makes its rows NaN. Keys that its last block of 256 lacks get
a score of -60000 before the scale, which hides them only beside scores that are well above it. Dividing q and k keeps a
large score finite, not exact: float16 rounds it by the same part of it.
"""

from __future__ import annotations

import math

from polyattn_npu.options import NpuOptions

#: The rows between which MindIE-SD runs it, and of a block.
LEAST_ROWS, MOST_ROWS, BLOCK = 2048, 128 * 1024, 256
#: The largest factor by which inputs are divided: beyond it a value of 1 leaves float16's normal range.
LARGEST_SCALE = 2**14
#: The largest float16, and how much rounding q and k to it may lengthen their product.
LARGEST, _ROUNDED = 65504.0, (1 + 2**-11) ** 2
#: The score of keys that are not there, and by how much the others must exceed it, once scaled: exp(-32) is 1e-14.
TAIL, BELOW = -60000.0, 32.0

#: The most by which rounding of small float16 scores, 2**-25 each, may move a logit.
_MOST_OFF, _ROUNDING = 2.0**-7, 2.0**-25
#: The most by which rounding of large ones, by this part of each, may, by the inputs' dtype.
_MOST_ROUNDED, _ROUNDED_TO = {"float16": 2.0**-7, "bfloat16": 2.0**-5}, 2.0**-11


def input_scale(options: NpuOptions, head_dim: int, keys: int, scale: float) -> int:
    """What q, k and v are divided by: as stated; else the least that the declared range needs; else 1."""
    if options.laser_input_scale is not None:
        return options.laser_input_scale
    if options.laser_max_abs is None:
        return 1
    return least_scale(options.laser_max_abs, head_dim, keys, scale)


def least_scale(max_abs: float, head_dim: int, keys: int, scale: float) -> int:
    """The smallest power of two that keeps every score within float16 and above the missing keys'."""
    factor = 1
    while factor < 2 * LARGEST_SCALE and not _fits(largest_score(max_abs / factor, head_dim), keys, scale, factor):
        factor *= 2
    return factor


def largest_score(max_abs: float, head_dim: int) -> float:
    """The largest unscaled score of q and k whose entries are no larger, once rounded to float16."""
    return head_dim * max_abs * max_abs * _ROUNDED


def _fits(score: float, keys: int, scale: float, factor: int) -> bool:
    if score > LARGEST:
        return False
    return keys % BLOCK == 0 or (-score - TAIL) * positive(scale) * factor * factor >= BELOW


def too_coarse(factor: int, scale: float) -> bool:
    """Whether scores of inputs that were divided by this are so small that their rounding moves the logits."""
    return positive(scale) * factor * factor * _ROUNDING > _MOST_OFF


def likely_logit(max_abs: float, head_dim: int, scale: float) -> float:
    """A logit of q and k whose entries are all as large as declared, with independent signs."""
    return math.sqrt(head_dim) * max_abs * max_abs * positive(scale)


def too_rough(max_abs: float, head_dim: int, scale: float, dtype: str) -> bool:
    """Whether float16, whatever q and k are divided by, rounds such logits by more than the inputs' dtype lets pass.

    On the emulator inputs spread evenly up to this limit keep the output within 5e-3 and 2e-2 of its largest entry;
    with entries of one sign, sqrt(head_dim) times that.
    """
    most = _MOST_ROUNDED.get(dtype)  # other dtypes are refused as such
    return most is not None and likely_logit(max_abs, head_dim, scale) * _ROUNDED_TO > most


def is_taken(factor: int, scale: float) -> bool:
    """Whether inputs may be divided by this at all: what a refusal suggests must not be refused in turn."""
    return factor <= LARGEST_SCALE and not too_coarse(factor, scale)


def positive(scale: float) -> float:
    """The scale that the op gets, for one that is not positive too."""
    return abs(scale) or 1.0
