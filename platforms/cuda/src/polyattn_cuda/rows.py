"""How token rows are moved on these devices: by the core's Triton kernels."""

from polyattn.vendor import TRITON_ROWS as ROWS

__all__ = ["ROWS"]
