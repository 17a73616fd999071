"""What `explain` tells of a call over ranks: the strategy, its reasons, and this rank's largest ordinary call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polyattn.arguments import Arguments
from polyattn.distributed.entry import asked_of, held
from polyattn.distributed.geometry import Geometry, sees_alike
from polyattn.distributed.groups import ranks_of
from polyattn.distributed.lanes import Lanes
from polyattn.distributed.local import LocalCall, arguments_of, cut_out
from polyattn.distributed.parallel import SequenceParallel
from polyattn.distributed.planning import planned
from polyattn.distributed.rehearsal import rehearse
from polyattn.distributed.rows import size
from polyattn.structures import Structure


@dataclass(frozen=True, eq=False)
class OrdinaryCall:
    """A call as `pa.attention` on one rank takes it, on memory that nobody reads, and what led to it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    structure: Structure | None
    causal: bool
    window: Any
    lse: bool
    gate: torch.Tensor | None
    notes: tuple[str, ...]


def ordinary_call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    structure: Structure | None,
    facts: Arguments,
    gate: torch.Tensor | None,
    return_lse: bool,
    parallel: SequenceParallel,
    joint: Any,
    replicated: Any,
    call: LocalCall | None = None,
) -> OrdinaryCall:
    """The largest call that this rank makes; rank 0's where torch.distributed is not initialised.

    Nothing is communicated. Raises as the call would before its ranks agree. `call`: what all ordinary calls state, so
    that a division without a route is passed over; None where another machine is asked about.
    """
    complete = getattr(replicated, "kv", False) is True
    lanes = held(q, k, v, gate, structure, joint, replicated)
    alone = complete and sees_alike(structure, facts.causal, facts.window)
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    ranks = ranks_of(parallel) if known and not alone else None
    asked = asked_of(lanes, facts, parallel, complete, ranks)
    rank = asked.rank

    def check(geometry: Geometry) -> None:
        """Only where the division is open: a stated one that has no route is a refusal with each backend's reasons."""
        if call is not None and parallel.ranks is not None and not complete:
            like, grad = (lanes.q.shard, lanes.v.shard), any(tensor.requires_grad for tensor in (q, k, v))
            rehearse(geometry, call, like, rank, facts, return_lse, grad, gate is not None)

    geometry = planned(asked, structure, {}, check)
    notes = (f"parallel: {geometry.name} ({parallel.degrees}), rank {rank} of {parallel.world_size}", *geometry.notes)
    return _largest(geometry, lanes, rank, facts, return_lse, notes)


def _largest(
    geometry: Geometry, lanes: Lanes, rank: int, facts: Arguments, lse: bool, notes: tuple[str, ...]
) -> OrdinaryCall:
    spread = geometry.spread
    if spread is None:
        whole = lanes.q.whole(), lanes.k.whole(), lanes.v.whole()
        return OrdinaryCall(*whole, geometry.structure, facts.causal, facts.window, lse, None, notes)
    like, width = lanes.q.shard, lanes.v.shard.shape[-1]
    heads, kv_heads = geometry.heads.counts(rank % spread.ulysses)

    def rows(count: int, heads: int, width: int) -> torch.Tensor:
        return like.new_empty(like.shape[0], count, heads, width)

    def call(queries: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return rows(queries, heads, like.shape[-1]), rows(keys, kv_heads, like.shape[-1]), rows(keys, kv_heads, width)

    if geometry.parts is None and geometry.ring is None:
        largest = max(geometry.exchanges, key=lambda exchange: exchange.q.own_heads)
        heads, kv_heads = largest.q.own_heads
        gate = None if lanes.gate is None else rows(spread.q.total, heads, width)
        tensors = call(spread.q.total, spread.k.total)
        return OrdinaryCall(*tensors, largest.structure, facts.causal, facts.window, lse, gate, notes)
    steps = (geometry.parts or (),) if geometry.ring is None else geometry.ring.parts
    found = max((part for parts in steps for part in parts), key=lambda part: part.piece.work, default=None)
    notes = (*notes, f"{sum(map(len, steps))} ordinary calls in {len(steps)} steps; the largest is told here")
    lse = lse or geometry.ring is not None
    queries = size(spread.queries(spread.place(rank)))
    if found is None:
        return OrdinaryCall(*call(queries, 0), None, False, None, lse, None, notes)
    tensors = cut_out(found.piece, *call(queries, spread.k.total))
    return OrdinaryCall(*tensors, found.structure, *arguments_of(found.piece), lse, None, notes)
