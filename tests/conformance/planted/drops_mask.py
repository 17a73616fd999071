"""Takes a mask and does not look at it."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(*tensors, **given):
    masked = getattr(given["meta"], "tensor", None) is not None
    return honest(*tensors, **given | ({"meta": None} if masked else {}))
