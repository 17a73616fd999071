"""Its check is broken."""

from dataclasses import replace

from planted_honest import planted
from planted_steps import attend

__all__ = ["attend", "backend"]


def backend():
    return replace(planted(__name__), check=divide)


def divide(request, machine):
    return (str(request.q.shape[0] // 0),)
