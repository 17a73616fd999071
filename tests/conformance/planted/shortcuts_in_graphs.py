"""Forgets the scale where autograd records nothing, as the forward of a compiled graph does."""

import torch
from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given if torch.is_grad_enabled() else given | {"scale": 1.0})
