"""Mask: nonzero may attend; an additive entry is added to the score, or hides its key at the finite minimum."""

from __future__ import annotations

import torch

from polyattn.reference.masked_softmax import masked_softmax
from polyattn.reference.rule import Rule
from polyattn.structures import Mask


def mask(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Mask, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq].

    `structure.tensor` is rank 4, [B|1,H|1,Sq|1,Sk], whatever rank it was given in.
    """
    entries = structure.tensor.to(q.device)
    visible = rule.positions(q.shape[1], k.shape[1], q.device)
    if not entries.dtype.is_floating_point:
        return masked_softmax(q, k, v, visible & entries.bool(), rule)
    # The minimum is the mask's own dtype's: float16 says "hidden" with -65504.
    hidden = entries <= torch.finfo(entries.dtype).min
    bias = entries.masked_fill(hidden, 0.0).to(q.dtype)
    return masked_softmax(q, k, v, visible & ~hidden, rule, bias)
