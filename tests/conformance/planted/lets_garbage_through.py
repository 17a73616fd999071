"""Multiplies what nobody sees by zero, which NaN survives."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, without_garbage=lambda tensor, unseen: tensor)
