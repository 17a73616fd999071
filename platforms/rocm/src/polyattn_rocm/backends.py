"""The attention backends of AMD ROCm; `order.py` says which is asked first."""

from __future__ import annotations

from polyattn.vendor import Backend, flex_backend, generic_backends, installed_versions, triton_backend
from polyattn_rocm import aiter, flash_attn, flash_attn_triton, torch_varlen

#: What these devices compute in.
DTYPES = frozenset({"bfloat16", "float16", "float32", "float64"})
#: Under which names releases of torch for ROCm bring Triton.
TRITON = ("pytorch-triton-rocm", "triton-rocm", "triton")

_triton = next(iter(installed_versions(TRITON)), TRITON[-1])

BACKENDS: tuple[Backend, ...] = (
    aiter.backend(),
    flash_attn.backend(),
    flash_attn_triton.backend(),
    torch_varlen.backend(),
    triton_backend(_triton),
    flex_backend(_triton, "torch's ROCm wheels bring it"),
    *generic_backends(DTYPES),
)
