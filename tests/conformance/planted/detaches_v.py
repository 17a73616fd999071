"""Claims gradients and cuts V off from them."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(q, k, v, out, **given):
    return honest(q, k, v.detach(), out, **given)
