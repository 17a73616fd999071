"""Softmax of a row of -inf, taken as it comes."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, unless_empty=lambda scores, empty: scores)
