"""Causal over any numbers of queries and keys, by a kernel that aligns it in our corner only where these are equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import pad

from polyattn.backends.calls import Result
from polyattn.backends.empty import empty_attention


def on_square(
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Result],
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    need_lse: bool,
) -> Result:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq] | None, aligned bottom-right.

    Rows are put before few queries; of many, those that see no key are left out.
    """
    more = q.shape[1] - k.shape[1]
    if more == 0:
        return attend(q, k, v)
    if k.shape[1] == 0:
        return empty_attention(q, k, v, need_lse)
    if more < 0:
        result, lse = attend(pad(q, (0, 0, 0, 0, -more, 0)), k, v)
        result = result.narrow(1, -more, q.shape[1])
        return result, None if lse is None else lse.narrow(2, -more, q.shape[1])
    blind, blind_lse = empty_attention(q.narrow(1, 0, more), k, v, need_lse)
    seeing, lse = attend(q.narrow(1, more, k.shape[1]), k, v)
    result = torch.cat((blind, seeing), dim=1)
    return result, None if lse is None or blind_lse is None else torch.cat((blind_lse, lse), dim=2)
