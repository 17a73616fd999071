"""How the FP8 quantisation cuts its tensors: vectors, heads and tokens of a program."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

#: Vectors that a program turns at once, loads in flight, tiles it goes through one after the other, warps that cast.
VECTORS = 128
STAGES = 2
LOOPS = 4
CAST_WARPS = 8

#: The widest block that is rotated as one: a matrix of it fits shared memory beside the tokens.
_WIDEST = 128
#: Elements of a token that one program reads side by side.
_ELEMENTS = 1024


class Cut(NamedTuple):
    """How a [B,S,H,D] tensor is cut.

    block   elements of a vector: the largest power of two that divides D, at most 128
    units   vectors of a token, H * (D // block)
    beside  of these, what one program takes: a power of two that divides them
    tokens  tokens of a tile
    """

    block: int
    units: int
    beside: int
    tokens: int


@lru_cache(maxsize=256)
def cut(heads: int, dim: int) -> Cut:
    """The cut for `heads` heads of `dim` elements.

    >>> cut(40, 128), cut(24, 72)
    (Cut(block=128, units=40, beside=8, tokens=16), Cut(block=8, units=216, beside=8, tokens=16))
    """
    block = min(_WIDEST, dim & -dim)
    units = heads * (dim // block)
    beside = min(units & -units, max(1, _ELEMENTS // block), VECTORS)
    return Cut(block, units, beside, VECTORS // beside)


def largest_warps(block: int) -> int:
    """Warps for the largest values; 8 for narrower vectors, Triton 3.9 fails to compile it for sm_100."""
    return 8 if block == _WIDEST else 4
