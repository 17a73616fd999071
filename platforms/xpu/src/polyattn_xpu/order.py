"""Which backend is asked first for a request on a device of Intel's; facts in, names out. Nothing is measured yet."""

from __future__ import annotations

from polyattn.vendor import Machine, Request

#: Kinds that torch's SDPA has a fused kernel for; others it runs piece by piece.
_FUSED = frozenset({"dense", "prefix_kv", "mask", "bias"})


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, expected fastest first."""
    if request.structure_kind in _FUSED:
        return ("vllm_xpu", "sdpa", "ipex", "triton", "blocked")
    return ("vllm_xpu", "ipex", "triton", "sdpa", "blocked")
