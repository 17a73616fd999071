"""Dense: every query sees every key, as far as causal and the window allow."""

from __future__ import annotations

import torch

from polyattn.reference.masked_softmax import masked_softmax
from polyattn.reference.rule import Rule
from polyattn.structures import Dense


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Dense, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq]."""
    visible = rule.positions(q.shape[1], k.shape[1], q.device)
    return masked_softmax(q, k, v, visible, rule)
