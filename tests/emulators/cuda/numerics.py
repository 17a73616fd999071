"""Attention and its gradients in float64 by plain formulas, for emulators: one document at a time, no autograd."""

from __future__ import annotations

import torch


def band(queries: int, keys: int, left: int, right: int) -> torch.Tensor:
    """Bool [queries,keys]: a window beside the bottom-right diagonal; a negative side is unbounded."""
    row, key = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if left >= 0:
        seen &= key >= row - left
    if right >= 0:
        seen &= key <= row + right
    return seen


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [Sq,H,D], k [Sk,Hk,D], v [Sk,Hk,Dv], seen and bias [H|1,Sq,Sk] -> out [Sq,H,Dv], lse [H,Sq], both float64.

    A row that sees nothing is 0, its LSE -inf. A hidden value still enters the product with weight 0, so that its NaN
    comes through, as in a kernel.
    """
    scores, _ = _scores(q, k, seen, scale, softcap, bias)
    lse = scores.logsumexp(-1) if k.shape[0] else scores.new_full(scores.shape[:2], float("-inf"))
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    return torch.einsum("hij,jhd->ihd", weights, _wide(v, q)), lse


def gradients(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    bias: torch.Tensor | None = None,
    dlse: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k, v in float64, from dout [Sq,H,Dv] and dlse [H,Sq]; arguments as in `attend`."""
    scores, slope = _scores(q, k, seen, scale, softcap, bias)
    out, lse = attend(q, k, v, seen, scale=scale, softcap=softcap, bias=bias)
    weights = (scores - lse.masked_fill(lse.isneginf(), 0.0)[..., None]).exp()
    dout = dout.double()
    dv = torch.einsum("hij,ihd->jhd", weights, dout)
    dweights = torch.einsum("ihd,jhd->hij", dout, _wide(v, q))
    centre = (dout * out).sum(-1).T
    if dlse is not None:
        centre = centre - dlse.double().masked_fill(lse.isneginf(), 0.0)
    dscores = weights * (dweights - centre[..., None]) * slope * scale
    dq = torch.einsum("hij,jhd->ihd", dscores, _wide(k, q))
    dk = torch.einsum("hij,ihd->jhd", dscores, q.double())
    return dq, _narrow(dk, k), _narrow(dv, v)


def _scores(
    q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float, softcap: float, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Scores [H,Sq,Sk], -inf where hidden, and the softcap's slope."""
    scores = torch.einsum("ihd,jhd->hij", q.double(), _wide(k, q)) * scale
    slope: torch.Tensor | float = 1.0
    if softcap:
        squashed = torch.tanh(scores / softcap)
        scores, slope = softcap * squashed, 1 - squashed**2
    if bias is not None:
        scores = scores + bias.double()
    return scores.masked_fill(~seen, float("-inf")), slope


def _wide(kv: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """One KV head a query head, in float64."""
    return kv.double().repeat_interleave(q.shape[1] // kv.shape[1], dim=1)


def _narrow(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum over the query heads that share a KV head."""
    return gradient.unflatten(1, (like.shape[1], -1)).sum(2)
