"""The attention backends of NVIDIA CUDA; `order.py` says which is asked first."""

from __future__ import annotations

from polyattn.vendor import Backend, generic_backends, triton_backend
from polyattn_cuda import cudnn, fa3, fa4, fastvideo, flash_attn, flex, sage, torch_varlen

#: What these devices compute in.
DTYPES = frozenset({"bfloat16", "float16", "float32", "float64"})

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
    *generic_backends(DTYPES),
)
