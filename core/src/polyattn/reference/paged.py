"""Paged: row b's keys are the first `kv_lengths[b]` slots of its pages; its queries are the last positions."""

from __future__ import annotations

import torch

from polyattn.reference.masked_softmax import masked_softmax
from polyattn.reference.rule import Rule
from polyattn.reference.spans import seen_with_spans
from polyattn.structures import Paged


def paged(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Paged, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """k [pages,page_size,Hk,D], v [pages,page_size,Hk,Dv].

    q [B,Sq,H,D] -> out [B,Sq,H,Dv], lse [B,H,Sq]; packed q [T,H,D] -> out [T,H,Dv], lse [H,T].
    """
    if q.dim() == 4:
        return _batched(q, k, v, structure, rule)
    assert structure.q_lengths is not None
    out = q.new_zeros(*q.shape[:2], v.shape[-1])
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"))
    start = 0
    for row, count in enumerate(structure.q_lengths.tolist()):
        answer, its_lse = _row(q[start : start + count], k, v, structure, row, rule)
        out[start : start + count] = answer
        lse[:, start : start + count] = its_lse
        start += count
    return out, lse


def _batched(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Paged, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, queries, heads, _ = q.shape
    counts = [queries] * batch if structure.q_lengths is None else structure.q_lengths.tolist()
    out = q.new_zeros(batch, queries, heads, v.shape[-1])
    lse = q.new_full((batch, heads, queries), float("-inf"))
    for row, count in enumerate(counts):
        answer, its_lse = _row(q[row, :count], k, v, structure, row, rule)
        out[row, :count] = answer
        lse[row, :, :count] = its_lse
    return out, lse


def _row(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Paged, row: int, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row's queries [Sq,H,D] -> out [Sq,H,Dv], lse [H,Sq]."""
    queries, pages, page_size = q.shape[0], k.shape[0], k.shape[1]
    keys = int(structure.kv_lengths[row])
    table = structure.block_table[row].tolist()
    slots = [(table[j // page_size] if j // page_size < len(table) else -1, j % page_size) for j in range(keys)]
    # An entry that names no page of the pool hides its keys; they keep their positions.
    exists = torch.tensor([0 <= page < pages for page, _ in slots], dtype=torch.bool, device=q.device)
    page = torch.tensor([page if 0 <= page < pages else 0 for page, _ in slots], dtype=torch.int64, device=q.device)
    offset = torch.tensor([offset for _, offset in slots], dtype=torch.int64, device=q.device)
    if structure.spans is None:
        visible = rule.positions(queries, keys, q.device)
    else:
        where = list(range(keys - queries, keys))
        visible = seen_with_spans(where, keys, structure.spans[row], q.device)
    answer, lse = masked_softmax(q[None], k[page, offset][None], v[page, offset][None], visible & exists, rule)
    return answer[0], lse[0]
