"""The attention backends of NVIDIA CUDA; `order.py` says which is asked first."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, generic_backends, triton_backend
from polyattn_cuda import cudnn, fa3, fa4, fastvideo, flash_attn, flex, sage, torch_varlen

#: What these devices compute in.
DTYPES = frozenset({"bfloat16", "float16", "float32", "float64"})


def _of_these_devices(backend: Backend) -> Backend:
    """One of the core's portable backends, with the dtypes that these devices have."""
    features = [replace(slot.features, dtypes=slot.features.dtypes & DTYPES) for slot in backend.slots]
    slots = tuple(replace(slot, features=known) for slot, known in zip(backend.slots, features, strict=True))
    return replace(backend, slots=slots)


BACKENDS: tuple[Backend, ...] = (
    fa3.backend(),
    fa4.backend(),
    cudnn.backend(),
    flash_attn.backend(),
    torch_varlen.backend(),
    triton_backend(),
    fastvideo.backend(),
    flex.backend(),
    sage.backend(),
    *(_of_these_devices(backend) for backend in generic_backends()),
)
