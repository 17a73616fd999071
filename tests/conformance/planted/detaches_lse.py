"""Claims gradients and cuts the LSE off from them."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, lse_of=lambda lse: lse.detach())
