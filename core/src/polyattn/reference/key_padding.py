"""KeyPadding: a key is visible iff it is kept; with queries="same" a padded query row sees nothing."""

from __future__ import annotations

import torch

from polyattn.reference.masked_softmax import masked_softmax
from polyattn.reference.rule import Rule
from polyattn.structures import KeyPadding


def key_padding(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: KeyPadding, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq].

    Padding hides keys and nothing else: causal and the window keep the positions of the tensors as passed.
    """
    keep = structure.keep.to(q.device)
    visible = rule.positions(q.shape[1], k.shape[1], q.device) & keep[:, None, None, :]
    if structure.queries != "all":
        visible = visible & keep[:, None, :, None]
    return masked_softmax(q, k, v, visible, rule)
