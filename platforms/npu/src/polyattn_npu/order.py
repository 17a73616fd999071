"""The order in which backends are asked for a request on an Ascend NPU. Nothing is measured yet."""

from __future__ import annotations

from polyattn.vendor import Machine, Request
from polyattn_npu.options import asks_for_laser

#: Expected. `quant` takes only what asks to be quantised.
_EXACT = ("fusion", "mindie", "fia", "sdpa", "blocked", "quant")


def order(request: Request, machine: Machine) -> tuple[str, ...]:
    """Backend names, fastest first; `laser`, float16 all the way, first where it is asked for and last elsewhere."""
    if asks_for_laser(request.options, machine.env):
        return ("laser", *_EXACT)
    return (*_EXACT, "laser")
