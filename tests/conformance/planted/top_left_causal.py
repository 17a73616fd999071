"""Anchors the causal triangle at the first key instead of the last."""

import torch
from planted_honest import planted
from planted_steps import attend as honest
from planted_steps import positions


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, positions=top_left)


def top_left(queries, keys, causal, window):
    seen = positions(queries, keys, False, window)
    return seen & torch.ones(queries, keys, dtype=torch.bool).tril() if causal else seen
