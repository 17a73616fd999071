"""Part of the attention kernels: how a softcap bends scores."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def bent(x, CAPPED: tl.constexpr):
    """tanh(x); CAPPED: as `score_factors` names it, CAPPED_EXACTLY (2) keeps the digits of a small x."""
    found = 1.0 - 2.0 / (tl.exp2(x * 2.885390081777927) + 1.0)
    if CAPPED == 2:
        square = x * x
        series = x * (1.0 - square * (0.3333333333 - square * (0.1333333333 - square * 0.0539682540)))
        found = tl.where(square < 0.01, series, found)
    return found
