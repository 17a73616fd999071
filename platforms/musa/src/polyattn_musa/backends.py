"""The attention backends of Moore Threads MUSA; `order.py` says which is asked first."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, generic_backends
from polyattn_musa import mate, mudnn

#: What these devices compute in. They have no float64.
DTYPES = frozenset({"bfloat16", "float16", "float32"})


def _of_these_devices(backend: Backend) -> Backend:
    """One of the core's portable backends, with the dtypes that these devices have."""
    features = [replace(slot.features, dtypes=slot.features.dtypes & DTYPES) for slot in backend.slots]
    slots = tuple(replace(slot, features=known) for slot, known in zip(backend.slots, features, strict=True))
    return replace(backend, slots=slots)


BACKENDS: tuple[Backend, ...] = (
    mate.backend(),
    mudnn.backend(),
    *(_of_these_devices(backend) for backend in generic_backends()),
)
