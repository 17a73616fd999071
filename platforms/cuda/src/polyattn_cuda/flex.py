"""torch's flex attention on these devices: the core's slots, and the architectures that they compile for."""

from __future__ import annotations

from polyattn.vendor import Backend, Machine, Request, flex_backend

_TOO_OLD = ("sm_50", "sm_52", "sm_60", "sm_61", "sm_70", "sm_75")


def _objections(request: Request, machine: Machine) -> tuple[str, ...]:
    return (f"its kernels need sm_80 or later, this is {machine.arch}",) if machine.arch in _TOO_OLD else ()


def backend() -> Backend:
    """`cuda:flex`."""
    return flex_backend(hint="torch's CUDA wheels bring it", check=_objections)
