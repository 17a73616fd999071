"""The attention backends of Intel XPU; `order.py` says which is asked first."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import Backend, Requires, generic_backends, installed_versions, triton_backend
from polyattn_xpu import ipex, vllm_xpu

#: What these devices compute in. Not every one of them has float64.
DTYPES = frozenset({"bfloat16", "float16", "float32"})

#: What torch's XPU wheels call their Triton: the second name from torch 2.10 on.
TRITONS = ("pytorch-triton-xpu", "triton-xpu")


def _triton() -> Backend:
    """The core's kernels on the Triton that came with torch; the registry's triton-xpu is older than they need."""
    found = installed_versions(TRITONS)
    package = next((name for name in TRITONS if name in found), TRITONS[-1])
    hint = "torch's XPU wheels bring it; the registry's triton-xpu is another, and overwrites triton"
    return replace(triton_backend(package), requires=(Requires(package, "3.4", hint),))


BACKENDS: tuple[Backend, ...] = (
    vllm_xpu.backend(),
    ipex.backend(),
    _triton(),
    *generic_backends(DTYPES),
)
