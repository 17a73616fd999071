"""What makes scores powers of two, from a call's scale and softcap, for kernels that count in float32."""

from __future__ import annotations

from typing import NamedTuple

_LOG2_E = 1.4426950408889634

#: Factors are normal numbers of float32, and leave room for the scores: 0 and infinity would make NaN of them. By the
#: largest, scores that differ at all differ by more than any weight, as they do by what lies beyond it.
_LEAST, _LARGEST = 2.0**-126, 2.0**104
#: Where scale / softcap is less, the cap changes no score in float32.
_NO_CAP = 2.0**-60
#: A cap's plain tanh is off by about 1e-7 of the cap: up to this cap, less than the weights' own rounding in 16 bits.
_PLAIN = 1024.0

#: A fused s * outer - peak keeps digits that the peak has lost, which a large factor makes a huge weight of.
_FUSED = 2.0**7

#: How scores are capped: not at all, by a plain tanh, by one that keeps the digits of small scores, too.
UNCAPPED, CAPPED, CAPPED_EXACTLY = 0, 1, 2


class ScoreFactors(NamedTuple):
    """A score s is s * outer or, where it is capped, outer * tanh(s * inner), as the exponent of 2.

    fused: whether the kernel may fuse products and sums.
    """

    inner: float
    outer: float
    capped: int
    fused: bool


def score_factors(size: float, softcap: float, itemsize: int) -> ScoreFactors:
    """For the scale's absolute value, a softcap (0: none) and the bytes of an element; all factors are finite.

    >>> score_factors(1e-46, 0.0, 4).outer > 0.0, score_factors(1e39, 1e39, 4).inner
    (True, 1.0)
    """
    if softcap == 0.0 or size / softcap < _NO_CAP:
        inner, outer, capped = 1.0, _bounded(size * _LOG2_E), UNCAPPED
    else:
        inner, outer = _bounded(size / softcap), _bounded(softcap * _LOG2_E)
        capped = CAPPED if itemsize < 4 and softcap <= _PLAIN else CAPPED_EXACTLY
    return ScoreFactors(inner, outer, capped, outer <= _FUSED)


def _bounded(factor: float) -> float:
    return 0.0 if factor == 0.0 else min(max(factor, _LEAST), _LARGEST)
