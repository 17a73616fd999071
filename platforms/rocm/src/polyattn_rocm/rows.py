"""How token rows are moved on these devices: by the core's Triton kernels."""

from polyattn.vendor import TRITON_ROWS

#: Not measured here from how many padded rows on moving them pays.
ROWS = TRITON_ROWS

__all__ = ["ROWS"]
