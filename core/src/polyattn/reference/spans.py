"""Spans: causal, but a query inside a full span sees every key before the span's end."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from polyattn.reference.masked_softmax import masked_softmax
from polyattn.reference.rule import Rule
from polyattn.structures import Spans


def spans(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Spans, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq]."""
    queries, keys = q.shape[1], k.shape[1]
    where = list(range(keys - queries, keys))
    if structure.query_ranges is not None:
        where = [
            part.global_start + offset
            for part in structure.query_ranges
            for offset in range(part.local_end - part.local_start)
        ]
    rows = [seen_with_spans(where, keys, pairs, q.device) for pairs in structure.full]
    visible = torch.stack(rows) if rows else torch.ones(0, queries, keys, dtype=torch.bool, device=q.device)
    return masked_softmax(q, k, v, visible[:, None], rule)


def seen_with_spans(where: list[int], keys: int, full: Iterable[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Bool [queries,keys] for queries at global positions `where` of one row with these full spans."""
    position = torch.tensor(where, dtype=torch.int64, device=device)[:, None]
    key = torch.arange(keys, device=device)[None, :]
    visible = key <= position
    for start, end in full:
        visible |= (start <= position) & (position < end) & (key < end)
    return visible
