"""Claims softcap and compiled graphs, and objects to every request that has one or is made by the other."""

from dataclasses import replace

from planted_honest import planted
from planted_steps import attend

__all__ = ["attend", "backend"]


def backend():
    return replace(planted(__name__), check=object_to_some)


def object_to_some(request, machine):
    return ("for another day",) if request.softcap or request.compiling else ()
