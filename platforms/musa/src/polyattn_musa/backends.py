"""The attention backends of Moore Threads MUSA; `order.py` says which is asked first."""

from __future__ import annotations

from polyattn.vendor import Backend, generic_backends
from polyattn_musa import mate, mudnn

#: What these devices compute in. They have no float64.
DTYPES = frozenset({"bfloat16", "float16", "float32"})

BACKENDS: tuple[Backend, ...] = (
    mate.backend(),
    mudnn.backend(),
    *generic_backends(DTYPES),
)
