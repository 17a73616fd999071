"""Which backend is asked first for a request on a device of AMD's; facts in, names out.

Expected, not measured: no such device was at hand.
"""

from __future__ import annotations

from polyattn.vendor import Machine, Request

#: Data centre devices, which the makers' packages are written for; and the others, where Triton's are.
_INSTINCT = ("aiter", "flash_attn", "flash_attn_triton", "torch_varlen", "triton", "sdpa", "blocked", "flex")
_OTHERS = ("flash_attn_triton", "triton", "flash_attn", "torch_varlen", "sdpa", "blocked", "flex", "aiter")


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, fastest first."""
    return _INSTINCT if machine.arch.startswith("gfx9") else _OTHERS
