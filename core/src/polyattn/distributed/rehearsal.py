"""The ordinary calls of a plan, routed before anything is communicated: who cannot make one says so in time."""

from __future__ import annotations

import torch

from polyattn.arguments import Arguments
from polyattn.distributed.geometry import Geometry
from polyattn.distributed.local import LocalCall, arguments_of, cut_out
from polyattn.distributed.parts import Part
from polyattn.distributed.rows import size
from polyattn.scope import logs_here
from polyattn.structures import Structure
from polyattn.structures.video_gate import gated


def rehearse(
    geometry: Geometry,
    call: LocalCall,
    like: tuple[torch.Tensor, torch.Tensor],
    rank: int,
    facts: Arguments,
    need_lse: bool,
    grad: bool,
    gate: bool,
) -> None:
    """Route every ordinary call of one rank, on memory that nobody reads; raises what the call would.

    `like`: a q and a v, for batch, widths, dtype and device. Logs of routes do not see it.
    """
    spread = geometry.spread
    assert spread is not None
    q, v = like
    heads, kv_heads = geometry.heads.counts(rank % spread.ulysses)
    if heads == 0:
        return

    def rows(count: int, heads: int, width: int) -> torch.Tensor:
        return q.new_empty(q.shape[0], count, heads, width, requires_grad=grad)

    def keys(count: int) -> tuple[torch.Tensor, torch.Tensor]:
        return rows(count, kv_heads, q.shape[-1]), rows(count, kv_heads, v.shape[-1])

    place = spread.place(rank)
    silent = logs_here.set(())
    try:
        if geometry.ring is not None:
            queries = rows(size(spread.queries(place)), heads, q.shape[-1])
            for step, parts in enumerate(geometry.ring.parts):
                own = size(spread.own_keys(place)) if step == 0 else geometry.ring.sizes[geometry.ring.origin(step)]
                _route(call, parts, queries, *keys(own), True)
        elif geometry.parts is not None:
            queries = rows(size(spread.queries(place)), heads, q.shape[-1])
            _route(call, geometry.parts, queries, *keys(spread.k.total), need_lse)
        else:
            for exchange in geometry.exchanges:
                heads, kv_heads = exchange.q.own_heads
                everything = rows(spread.q.total, heads, q.shape[-1]), *keys(spread.k.total)
                structure: Structure | None = exchange.structure
                if gate:
                    structure = gated(structure, rows(spread.q.total, heads, v.shape[-1]), *everything)
                call.plan(*everything, structure, facts.causal, facts.window, need_lse)
    finally:
        logs_here.reset(silent)


def _route(
    call: LocalCall, parts: tuple[Part, ...], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, need_lse: bool
) -> None:
    for part in parts:
        causal, window = arguments_of(part.piece)
        call.plan(*cut_out(part.piece, q, k, v), part.structure, causal, window, need_lse)
