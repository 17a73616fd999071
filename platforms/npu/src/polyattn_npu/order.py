"""Which backend is asked first for a request on a device of Ascend's; facts in, names out. Nothing is measured yet."""

from __future__ import annotations

from polyattn.vendor import Machine, Request

#: Expected. `laser` computes in float16 and `quant` quantises: both take only what asks for them.
_ORDER = ("fusion", "mindie", "fia", "laser", "quant", "sdpa", "blocked")


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, fastest first."""
    return _ORDER
