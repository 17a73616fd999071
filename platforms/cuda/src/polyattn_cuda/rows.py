"""How token rows are moved on these devices: by the core's Triton kernels."""

from polyattn.vendor import TRITON_ROWS

#: An H200 moves rows at 4.2 TB/s and computes at 600 TFLOP/s: packing and unpacking a row (8 bytes an element) takes as
#: long as its products with 280 keys (4 operations an element and key).
ROWS = TRITON_ROWS._replace(few=280)

__all__ = ["ROWS"]
