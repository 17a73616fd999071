"""Claims fp8 and computes as if it had not been asked for."""

from planted_quantises import planted_format
from planted_steps import attend

__all__ = ["attend", "backend"]


def backend():
    return planted_format(__name__)
