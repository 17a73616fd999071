"""Which backend is fastest for a request on a device of Intel's; facts in, names out."""

from __future__ import annotations

from polyattn.vendor import Machine, Request


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, fastest first."""
    return ("sdpa", "blocked")
