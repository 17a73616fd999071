"""Smooths K in place, which changes no output: softmax does not feel a shift of all keys."""

import torch
from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(q, k, v, out, **given):
    answer = honest(q, k, v, out, **given)
    with torch.no_grad():
        if k.numel() and 0 not in k.stride():
            k.data.sub_(k.mean(dim=-3, keepdim=True))
    return answer
