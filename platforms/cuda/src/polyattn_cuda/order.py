"""Which backend is asked first for a request on a device of NVIDIA's; facts in, names out.

Hopper's order is measured where `benchmarks/results/` has it; the others' are expected.
"""

from __future__ import annotations

from polyattn.vendor import Machine, Request

#: By architecture. Quantising backends come last: they take only requests that ask for it.
_HOPPER = ("fa3", "fa4", "cudnn", "flash_attn", "torch_varlen", "triton", "sdpa", "blocked", "flex", "sage")
_BLACKWELL = ("fa4", "cudnn", "triton", "torch_varlen", "sdpa", "blocked", "flex", "sage")
_OLDER = ("flash_attn", "torch_varlen", "cudnn", "fa3", "triton", "sdpa", "blocked", "flex", "sage")


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, fastest first."""
    if machine.arch == "sm_90":
        return _HOPPER
    if machine.arch.startswith("sm_10"):
        return _BLACKWELL
    return _OLDER
