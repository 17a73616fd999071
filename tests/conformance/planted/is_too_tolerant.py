"""Declares a tolerance that nothing could fail."""

from dataclasses import replace

from planted_honest import planted
from planted_steps import attend

__all__ = ["attend", "backend"]


def backend():
    return replace(planted(__name__), tolerances={"float32": 0.5})
