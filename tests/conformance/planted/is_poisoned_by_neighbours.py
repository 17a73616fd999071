"""Runs packed documents as one, under a mask, so that 0 times another document's NaN reaches everybody."""

import torch
from planted_honest import planted
from planted_steps import attend as honest
from planted_steps import documents


def backend():
    return planted(__name__)


def attend(q, k, v, out, *, meta, **given):
    if q.dim() == 4 or q.requires_grad or k.requires_grad or v.requires_grad or given["causal"] or given["window"]:
        return honest(q, k, v, out, meta=meta, **given)
    seen = torch.zeros(q.shape[0], k.shape[0], dtype=torch.bool)
    for (start, end), (k_start, k_end) in documents(q, k, meta):
        seen[start:end, k_start:k_end] = True
    whole = [tensor.unsqueeze(0) for tensor in (q, k, v)]
    answer, lse = honest(*whole, None, meta=None, **given, positions=lambda *rule: seen)
    answer = answer[0] if out is None else out.copy_(answer[0])
    return answer, None if lse is None else lse[0]
