"""An additive mask as `pse` of npu_fusion_attention: before the scale, of q's dtype, and yet what its entries say."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

#: The smallest scale that a bias is divided by as it is, by q's dtype: its quotient leaves the range of that otherwise.
_LEAST_SCALE = {torch.float16: 1.0}
_LEAST_OF_OTHERS = 2.0**-100


class Bias(NamedTuple):
    """What the op adds, and what it leaves for the LSE.

    pse     finite, of q's dtype, [B,H,1,Sk], [1,H,Sq,Sk] or [B,H,Sq,Sk]
    peak    float32 [B|1,H|1,Sq|1]: the largest visible entry of each row of the mask, which is not in `pse`
    """

    pse: torch.Tensor
    peak: torch.Tensor


def room_for_bias(q: torch.Tensor, scale: float) -> tuple[torch.Tensor, float]:
    """The same scores by a scale from 1 on, where a bias divided by a smaller one would leave the dtype's range."""
    if scale >= _LEAST_SCALE.get(q.dtype, _LEAST_OF_OTHERS):
        return q, scale
    mantissa, exponent = math.frexp(scale)
    return q * 2.0 ** (exponent - 1), 2.0 * mantissa


def before_scale(bias: torch.Tensor, size: tuple[int, int, int], scale: float, dtype: torch.dtype) -> Bias:
    """From a mask [B|1,H|1,Sq|1,Sk], -inf where it hides, for so many samples, heads and queries.

    A softmax does not see what all of a row has in common. Without its largest entry a row is near 0 where it matters:
    neither the range nor the digits of q's dtype, which the mask's may exceed, then tell entries apart that count.
    """
    batch, heads, queries = size
    wide = bias.to(torch.promote_types(bias.dtype, torch.float32))
    peak = wide.amax(dim=-1, keepdim=True) if wide.shape[-1] else wide.sum(dim=-1, keepdim=True)
    peak = peak.masked_fill(peak.isneginf(), 0.0)  # a row that sees nothing
    limits = torch.finfo(dtype)
    pse = ((wide - peak) / scale).masked_fill(wide.isneginf(), 0.0).clamp(limits.min, limits.max).to(dtype)
    one_row = pse.shape[2] == 1
    samples = pse.shape[0] if pse.shape[0] == 1 and not one_row else batch
    pse = pse.expand(samples, heads, 1 if one_row else queries, -1).contiguous()
    return Bias(pse, peak.squeeze(-1).float())
