"""Softmax attention under an explicit visibility matrix: the one formula that every structure's meaning ends in."""

from __future__ import annotations

import torch

from polyattn.reference.rule import Rule


def masked_softmax(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    rule: Rule,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each query row is the softmax-weighted mean of the values it sees.

    q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv]; visible (bool) and bias (added to the scores, finite) broadcast to
    [B,H,Sq,Sk]. Returns out [B,Sq,H,Dv] and lse [B,H,Sq]; a row that sees nothing is 0 with lse -inf.
    """
    batch, queries, heads, _ = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    group = heads // kv_heads
    visible = visible.expand(batch, heads, queries, keys)

    # What nobody sees must not matter, whatever it holds: 0 * nan would be nan.
    unseen_key = ~visible.unflatten(1, (kv_heads, group)).any(dim=2).any(dim=2).transpose(1, 2)
    k = k.masked_fill(unseen_key[..., None], 0.0)
    v = v.masked_fill(unseen_key[..., None], 0.0)
    empty_row = ~visible.any(dim=-1)
    q = q.masked_fill(empty_row.transpose(1, 2)[..., None], 0.0)

    # Query head h uses KV head h // group.
    k = k.repeat_interleave(group, dim=2)
    v = v.repeat_interleave(group, dim=2)

    scores = torch.einsum("bihd,bjhd->bhij", q, k) * rule.scale
    if rule.softcap > 0.0:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    if bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(~visible, float("-inf"))

    # An empty row has no finite score; any finite stand-in keeps its weights, and its gradients, at exactly 0.
    scores = scores.masked_fill(empty_row[..., None], 0.0)
    lse = scores.logsumexp(dim=-1)
    weights = scores.softmax(dim=-1).masked_fill(empty_row[..., None], 0.0)  # sums to 1, however large scores are
    out = torch.einsum("bhij,bjhd->bihd", weights, v)
    return out, lse.masked_fill(empty_row, float("-inf"))
