"""Correct, and requires a distribution that only it knows of: the one it is installed by."""

from dataclasses import replace

from planted_honest import planted
from planted_steps import attend

from polyattn.vendor import Requires

__all__ = ["attend", "backend"]


def backend():
    return replace(planted(__name__), requires=(Requires("planted-attn", "1.0"),))
