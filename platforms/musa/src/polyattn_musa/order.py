"""Which backend is asked first on a device of Moore Threads'; facts in, names out. Nothing is measured yet."""

from __future__ import annotations

from polyattn.vendor import Machine, Request


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, expected fastest first."""
    return ("mate", "mudnn", "sdpa", "blocked")
