"""Returns an LSE that asks for a gradient and drops what it is given, as a fused backward without that term does."""

import torch
from planted_honest import planted
from planted_steps import attend as honest


class Dropped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, lse):
        return lse.clone()

    @staticmethod
    def backward(ctx, gradient):
        return torch.zeros_like(gradient)


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, lse_of=Dropped.apply)
