"""polyattn's side of a comparison: the public call, and the name of the route that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import polyattn as pa


def ours(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Any = None, **arguments: Any
) -> Callable[[], Any]:
    """`pa.attention` of these."""
    return lambda: pa.attention(q, k, v, structure=structure, **arguments)


def route(call: Callable[[], Any]) -> str:
    """The routes that one call takes, by name."""
    with pa.record_routes() as log:
        call()
    return ", ".join(entry.route for entry in log.entries)
