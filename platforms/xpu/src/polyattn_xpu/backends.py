"""The attention backends of Intel XPU, fastest first."""

from polyattn.backends.sdpa import generic_backend
from polyattn.vendor import Backend

BACKENDS: tuple[Backend, ...] = (generic_backend(),)
