"""Correct, and requires a version of its distribution that is not installed."""

from dataclasses import replace

from planted_honest import planted
from planted_steps import attend

from polyattn.vendor import Requires

__all__ = ["attend", "backend"]


def backend():
    return replace(planted(__name__), requires=(Requires("planted-attn", "2.0", "pip install -U planted-attn"),))
