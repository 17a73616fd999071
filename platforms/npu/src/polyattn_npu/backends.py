"""The attention backends of Ascend NPU; `order.py` says which is asked first."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, generic_backends
from polyattn_npu import fia, fusion, laser, mindie, quant, sdpa
from polyattn_npu.op_limits import DTYPES


def _of_these_devices(backend: Backend) -> Backend:
    """One of the core's portable backends, with the dtypes and the limits that it has on these devices."""
    if backend.name == "sdpa":
        return sdpa.backend(backend)
    features = [replace(slot.features, dtypes=slot.features.dtypes & DTYPES) for slot in backend.slots]
    slots = tuple(replace(slot, features=known) for slot, known in zip(backend.slots, features, strict=True))
    return replace(backend, slots=slots)


BACKENDS: tuple[Backend, ...] = (
    fusion.backend(),
    mindie.backend(),
    fia.backend(),
    laser.backend(),
    quant.backend(),
    *(_of_these_devices(backend) for backend in generic_backends()),
)
