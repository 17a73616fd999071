"""Generic routes: exact ways to serve a request through a slot that serves a simpler one. One file each.

A composition lowers a request to the one its inner slot must accept, and wraps that slot. Its route is named after it,
`loop(cpu:sdpa)`; compositions nest, outermost first: `gather(loop(cpu:sdpa))`.

A route through them carries what each lowered the request to, and is wrapped innermost first:

    for composition, lowered in zip(reversed(route.compositions), reversed(route.lowered)):
        call = load(composition.bind)(call, lowered)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from polyattn.compositions import gather, loop, mask, pack, pad, repeat, rows, segments, slice
from polyattn.door.backend import Features
from polyattn.door.request import Request


@dataclass(frozen=True)
class Composition:
    """One generic route.

    name    how the route is called: "loop"
    lower   (request, features of the slot that shall run in the end) -> the inner request; a text why a request of this
            kind cannot be lowered; or None where it does not apply. Pure: facts in, facts out. It lowers only to kinds
            that the slot takes, or that a further composition brings to it
    bind    "module:function", called once a route as f(inner, lowered) -> a callable that is called like a slot and
            writes into `out` where one is given. `inner` is called like a slot, without `out`; `lowered` is the inner
            request
    cheap   costs views, or copies of the tokens, beside the inner call: a faster backend stays faster through it
    """

    name: str
    lower: Callable[[Request, Features], Request | str | None]
    bind: str
    cheap: bool = False


#: Fastest first.
COMPOSITIONS: tuple[Composition, ...] = (
    Composition("slice", slice.lower, "polyattn.compositions.slice:bind", cheap=True),
    Composition("segments", segments.lower, "polyattn.compositions.segments:bind", cheap=True),
    Composition("pack", pack.lower, "polyattn.compositions.pack:bind", cheap=True),
    Composition("pad", pad.lower, "polyattn.compositions.pad:bind", cheap=True),
    Composition("repeat", repeat.lower, "polyattn.compositions.repeat:bind", cheap=True),
    Composition("rows", rows.lower, "polyattn.compositions.rows:bind"),
    Composition("loop", loop.lower, "polyattn.compositions.loop:bind"),
    Composition("gather", gather.lower, "polyattn.compositions.gather:bind"),
    Composition("mask", mask.lower, "polyattn.compositions.mask:bind"),
)

__all__ = ["COMPOSITIONS", "Composition"]
