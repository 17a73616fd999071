"""Packed: each document attends to itself alone; rows past the last boundary return 0."""

from __future__ import annotations

import torch

from polyattn.reference.masked_softmax import masked_softmax
from polyattn.reference.rule import Rule
from polyattn.reference.spans import seen_with_spans
from polyattn.structures import Packed


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Packed, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv] -> out [T,H,Dv], lse [H,T]; with a leading axis of 1 where q has one."""
    if q.dim() == 4:
        out, lse = packed(q[0], k[0], v[0], structure, rule)
        return out[None], lse[None]
    starts_q, starts_k = structure.cu_q.tolist(), structure.cu_k.tolist()
    answers = []
    for document in range(len(starts_q) - 1):
        q_start, q_end = starts_q[document], starts_q[document + 1]
        k_start, k_end = starts_k[document], starts_k[document + 1]
        visible = _within_document(structure, document, q_end - q_start, k_end - k_start, rule, q.device)
        # Slices stop at the tensors' ends: boundaries beyond them name rows that are hidden.
        its_q, its_k, its_v = q[None, q_start:q_end], k[None, k_start:k_end], v[None, k_start:k_end]
        visible = visible[: its_q.shape[1], : its_k.shape[1]]
        answers.append(masked_softmax(its_q, its_k, its_v, visible, rule))
    # The rows past the last boundary are a document without keys.
    rest = q[None, starts_q[-1] :]
    nothing = torch.ones(rest.shape[1], 0, dtype=torch.bool, device=q.device)
    answers.append(masked_softmax(rest, k[None, :0], v[None, :0], nothing, rule))
    return torch.cat([out[0] for out, _ in answers]), torch.cat([lse[0] for _, lse in answers], dim=-1)


def _within_document(
    structure: Packed, document: int, queries: int, keys: int, rule: Rule, device: torch.device
) -> torch.Tensor:
    if structure.spans is None:
        return rule.positions(queries, keys, device)
    return seen_with_spans(list(range(keys - queries, keys)), keys, structure.spans[document], device)
