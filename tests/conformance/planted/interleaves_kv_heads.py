"""Gives query head h the KV head h % Hkv."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    return honest(*tensors, **given, repeated=lambda tensor, group: tensor.repeat(1, 1, group, 1))
