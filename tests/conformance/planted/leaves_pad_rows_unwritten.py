"""Allocates the packed output and writes the documents' rows only."""

import torch
from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(q, k, v, out, **given):
    answer, lse = honest(q, k, v, None, **given)
    if q.dim() == 4 or answer.requires_grad:
        return (answer if out is None else out.copy_(answer)), lse
    unwritten = torch.empty_like(answer) if out is None else out
    used = int(given["meta"].cu_q[-1])
    unwritten[:used] = answer[:used]
    return unwritten, lse
