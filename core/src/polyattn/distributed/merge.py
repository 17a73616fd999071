"""Two partial attentions of the same queries over disjoint keys, made one by their LSE, in float32."""

from __future__ import annotations

import torch

Partial = tuple[torch.Tensor, torch.Tensor]


def merged(first: Partial, second: Partial) -> Partial:
    """The attention over both sets of keys, of (out [B,S,H,D], lse [B,H,S]) over each; differentiable.

    A row that saw no key on a side has LSE -inf there, and takes the other side; where both are -inf it stays 0. The
    result is in float32 at least. ValueError where an LSE is not laid out [B,H,S].

    >>> seven = torch.full((1, 1, 1, 1), 7.0), torch.full((1, 1, 1), 0.5)
    >>> nothing = torch.zeros(1, 1, 1, 1), torch.full((1, 1, 1), float("-inf"))
    >>> [part.item() for part in merged(nothing, seven)]
    [7.0, 0.5]
    """
    (a, lse_a), (b, lse_b) = (_checked(part) for part in (first, second))
    weight_a, weight_b, lse = _weights(lse_a, lse_b)
    return a.to(accumulator(a.dtype)) * weight_a + b.to(accumulator(b.dtype)) * weight_b, lse


def nothing_seen(q: torch.Tensor, width: int) -> Partial:
    """The partial attention of queries [B,S,H,D] over no key: what any other merges into."""
    batch, rows, heads = q.shape[:3]
    dtype = accumulator(q.dtype)
    return q.new_zeros(batch, rows, heads, width, dtype=dtype), q.new_full(
        (batch, heads, rows), float("-inf"), dtype=torch.float32
    )


def merge_into(total: Partial, part: Partial, rows: tuple[int, int], batch: tuple[int, int]) -> None:
    """Merge a partial attention of some rows of some samples into `total`, in place and without a copy in float32."""
    (b0, b1), (r0, r1) = batch, rows
    out, lse = total[0][b0:b1, r0:r1], total[1][b0:b1, :, r0:r1]
    more, more_lse = _checked(part)
    weight, more_weight, new_lse = _weights(lse, more_lse)
    out.mul_(weight).addcmul_(more, more_weight)
    lse.copy_(new_lse)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that partial outputs are summed in."""
    return torch.promote_types(dtype, torch.float32)


def _weights(lse_a: torch.Tensor, lse_b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What each side's output is worth, [B,S,H,1], and the LSE of both."""
    highest = torch.maximum(lse_a, lse_b).detach()
    highest = highest.masked_fill(highest == float("-inf"), 0.0)  # -inf less -inf is NaN
    share_a, share_b = (lse_a - highest).exp(), (lse_b - highest).exp()
    total = share_a + share_b
    unreached = total == 0.0
    whole = total.masked_fill(unreached, 1.0)
    weight_a, weight_b = ((share / whole).transpose(1, 2).unsqueeze(-1) for share in (share_a, share_b))
    return weight_a, weight_b, (highest + whole.log()).masked_fill(unreached, float("-inf"))


def _checked(part: Partial) -> Partial:
    out, lse = part
    batch, rows, heads = out.shape[:3]
    if lse.shape != (batch, heads, rows):
        raise ValueError(
            f"lse: [B,H,S] = {[batch, heads, rows]} is needed beside out {list(out.shape)}, got {list(lse.shape)}"
        )
    return out, lse.float()
