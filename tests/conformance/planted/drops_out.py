"""Claims `out` and returns a tensor of its own."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, deliver=lambda answer, out: answer)
