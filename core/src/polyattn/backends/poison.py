"""Rows that are not finite, where documents share a product: kept out of their neighbours', NaN in their own.

A weight of 0 does not stop a NaN, and the documents' ends are not known on the host: so such keys and values are taken
out, and the query rows that see one are NaN instead; so are query rows, where gradients pass through them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import pad

from polyattn.backends.calls import Result, wants_grad


class Apart(NamedTuple):
    """q, k, v [T,H,D] that are finite wherever one row could reach another, and feels [T|1,H]: rows that are NaN."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    feels: torch.Tensor

    def felt(self, result: torch.Tensor, lse: torch.Tensor | None) -> Result:
        """result [T,H,V] and lse [H,T] of these tensors, as the rows that were given make them."""
        nan = float("nan")
        lse = None if lse is None else lse.masked_fill(self.feels.T, nan)
        return result.masked_fill(self.feels.unsqueeze(-1), nan), lse


def apart(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    hidden: torch.Tensor, blind: torch.Tensor, first: torch.Tensor, last: torch.Tensor,
) -> Apart:  # fmt: skip
    """Of packed rows: hidden [1,Tk], blind [1,Tq|1], and first, last [1,Tq|1] of the keys that a row may see."""
    spoilt = (k.isfinite().all(-1) & v.isfinite().all(-1)).logical_not()  # [Tk,Hk]
    wrong = spoilt & hidden.T.logical_not()
    k, v = (rows.masked_fill((spoilt | hidden.T).unsqueeze(-1), 0.0) for rows in (k, v))
    before = pad(wrong.cumsum(0), (0, 0, 1, 0))  # [Tk+1,Hk]
    upto, since = before.index_select(0, last.flatten()), before.index_select(0, first.flatten())
    feels = (upto > since).repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # [T|1,H]
    if wants_grad(q, k, v):
        strange = q.isfinite().all(-1).logical_not()  # [T,H]
        q = q.masked_fill(strange.unsqueeze(-1), 0.0)
        feels = feels | strange & blind.T.logical_not()
    return Apart(q, k, v, feels)
