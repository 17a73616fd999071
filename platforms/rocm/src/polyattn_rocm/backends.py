"""The attention backends of AMD ROCm, fastest first."""

from polyattn.backends.sdpa import generic_backend
from polyattn.vendor import Backend

BACKENDS: tuple[Backend, ...] = (generic_backend(),)
