"""Uses the default scale whatever it is given."""

from planted_honest import planted
from planted_steps import attend as honest


def backend():
    return planted(__name__)


def attend(q, *rest, **given):
    return honest(q, *rest, **given | {"scale": q.shape[-1] ** -0.5})
