"""Attention in float64 as Ascend's kernels mean it: hidden scores are replaced by a finite number, never by -inf."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.emulators.npu.stack import lint

#: What a hidden score becomes, after the scale.
HIDDEN = -torch.finfo(torch.float32).max


class Attended(NamedTuple):
    """out [N,Sq,Dv], the rows' maximum and sum of exponentials [N,Sq], all float64."""

    out: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor


class Terms(NamedTuple):
    """What enters beside q, k and v. `zeroed`: a row that sees nothing gives 0, else the mean of V."""

    scale: float
    drop: torch.Tensor | None = None  # bool [N|1,Sq,Skv], True hides
    before: torch.Tensor | None = None  # [N|1,Sq|1,Skv], added before the scale
    after: torch.Tensor | None = None  # [N|1,Sq|1,Skv], added after it
    sink: torch.Tensor | None = None  # [N]: a logit of each head without a value
    zeroed: bool = False
    kept: torch.Tensor | None = None  # [N,Sq,Skv]: what dropout multiplies each weight by


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> Attended:
    """q [N,Sq,D], k [Nk,Skv,D], v [Nk,Skv,Dv].

    A hidden value enters the product with weight 0, so that its NaN comes through. Without keys: zeros.
    """
    lint(terms.scale > 0, f"scale {terms.scale}: not above 0, it may lift what a mask has hidden; no document has one")
    q, k, v = _by_head(q, k, v)
    if k.shape[1] == 0:
        blank = q.new_zeros(q.shape[:2])
        return Attended(q.new_zeros(*q.shape[:2], v.shape[2]), blank + HIDDEN, blank - HIDDEN)
    weights, maximum, total = _weights(q, k, terms)
    return Attended(_kept(weights, terms) @ v, maximum, total)


class Gradients(NamedTuple):
    """Of q [N,Sq,D], k and v [Nk,Skv,D], the scores after the scale [N,Sq,Skv] and, if there is one, the sink [N]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scores: torch.Tensor
    sink: torch.Tensor | None


def gradients(dy: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, terms: Terms) -> Gradients:
    """From dy [N,Sq,Dv], by the plain formulas: below the dispatcher torch records nothing."""
    kv_heads, dy, sink = k.shape[0], dy.double(), terms.sink
    q, k, v = _by_head(q, k, v)
    if k.shape[1] == 0:
        none = torch.zeros_like(sink, dtype=torch.float64) if sink is not None else None
        return Gradients(torch.zeros_like(q), k[:kv_heads], v[:kv_heads], q.new_zeros(*q.shape[:2], 0), none)
    weights, maximum, total = _weights(q, k, terms)
    dropped = _kept(weights, terms)
    centre = (dy * (dropped @ v)).sum(-1, keepdim=True)
    dscores = _kept(weights * (dy @ v.transpose(1, 2)), terms) - weights * centre
    if terms.drop is not None:
        dscores = dscores.masked_fill(terms.drop, 0.0)
    dk, dv = (dscores * terms.scale).transpose(1, 2) @ q, dropped.transpose(1, 2) @ dy
    dsink = None
    if sink is not None:
        dsink = -((sink.double()[:, None] - maximum).exp() / total * centre[..., 0]).sum(-1)
    folded = (t.unflatten(0, (kv_heads, -1)).sum(1) for t in (dk, dv))
    return Gradients(dscores * terms.scale @ k, *folded, dscores, dsink)


def _kept(weights: torch.Tensor, terms: Terms) -> torch.Tensor:
    return weights if terms.kept is None else weights * terms.kept


def _by_head(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    group = q.shape[0] // k.shape[0]
    return q.double(), k.double().repeat_interleave(group, 0), v.double().repeat_interleave(group, 0)


def _weights(q: torch.Tensor, k: torch.Tensor, terms: Terms) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights [N,Sq,Skv], the rows' maximum and sum of exponentials [N,Sq]."""
    scores = _scores(q, k, terms)
    maximum = scores.amax(-1)
    if terms.sink is not None:
        maximum = torch.maximum(maximum, terms.sink.double()[:, None])
    weights = (scores - maximum[..., None]).exp()
    total = weights.sum(-1)
    if terms.sink is not None:
        total = total + (terms.sink.double()[:, None] - maximum).exp()
    weights = weights / total[..., None]
    if terms.zeroed and terms.drop is not None:
        empty = terms.drop.all(-1).expand(q.shape[:2])
        weights, total = weights.masked_fill(empty[..., None], 0.0), total.masked_fill(empty, -HIDDEN)
    return weights, maximum, total


def _scores(q: torch.Tensor, k: torch.Tensor, terms: Terms) -> torch.Tensor:
    scores = q @ k.transpose(1, 2)
    if terms.before is not None:
        scores = scores + _finite(terms.before)
    scores = scores * terms.scale
    if terms.after is not None:
        scores = scores + _finite(terms.after)
    return scores if terms.drop is None else scores.masked_fill(terms.drop, HIDDEN)


def _finite(bias: torch.Tensor) -> torch.Tensor:
    """A bias of -inf gives NaN in the kernels' running softmax, in every row that has one."""
    bias = bias.double()
    return bias.masked_fill(bias.isneginf().any(-1, keepdim=True), float("nan"))
