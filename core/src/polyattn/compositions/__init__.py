"""Generic routes: exact ways to serve a request through a slot that serves a simpler one.

A composition lowers a request to the one its inner slot must accept, and runs the call through that slot. Its route is
named after it, `loop(cpu:sdpa)`; compositions nest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polyattn.door.request import Request


@dataclass(frozen=True)
class Composition:
    """One generic route.

    name    how the route is called: "loop"
    lower   request -> the inner request, or a text why it cannot be lowered, or None where it does not apply
    call    "module:function", called as f(inner, q, k, v, out, *, meta, causal, scale, window, softcap, need_lse,
            options) -> (out, lse | None); `inner` is called like a slot
    """

    name: str
    lower: Callable[[Request], Request | str | None]
    call: str
