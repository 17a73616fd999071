"""Rows of every rank gathered along one axis, straight into their place, differentiable; uneven numbers of rows too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from polyattn.distributed.failure import Communicating
from polyattn.distributed.merge import accumulator
from polyattn.distributed.peers import Peers, finish, start

#: torch 2.13 renamed it, and warns of the old name.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gathered(mine: torch.Tensor, sizes: tuple[int, ...], peers: Peers, lead: int = 0, trail: int = 0) -> torch.Tensor:
    """This rank's rows [n,...] -> [lead + all rows + trail, ...] in rank order; the caller fills lead and trail.

    The gradient of a row is the sum of what all ranks say about it.
    """
    everything: torch.Tensor = _Gathered.apply(mine, sizes, peers, lead, trail)  # type: ignore[no-untyped-call]
    return everything


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, mine: torch.Tensor, sizes: tuple[int, ...], peers: Peers, lead: int, trail: int
    ) -> torch.Tensor:
        ctx.sizes, ctx.peers, ctx.lead = sizes, peers, lead
        rows = sum(sizes)
        buffer = mine.new_empty(lead + rows + trail, *mine.shape[1:])
        into = buffer.narrow(0, lead, rows)
        if len(set(sizes)) == 1 and peers.alone_in_group:
            _all_gather(into, mine.contiguous(), group=peers.group)
        else:
            _each_to_each(into, mine.contiguous(), sizes, peers)
        ctx.save_for_backward(mine.new_empty(0))  # ranks that attend to nothing join where a checkpoint runs this again
        return buffer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        sizes, peers, _ = ctx.sizes, ctx.peers, ctx.saved_tensors
        parts = grad.narrow(0, ctx.lead, sum(sizes)).contiguous().split(sizes)
        received = grad.new_empty(len(sizes), sizes[peers.place], *grad.shape[1:])
        received[peers.place] = parts[peers.place]
        with Communicating(peers.group, "the backward of gathered keys"):
            _exchange(peers, parts, received)
        total = received.sum(dim=0, dtype=accumulator(grad.dtype)).to(grad.dtype)
        return total, None, None, None, None


def _each_to_each(into: torch.Tensor, mine: torch.Tensor, sizes: tuple[int, ...], peers: Peers) -> None:
    """No padding to the longest and no copy afterwards: every rank sends its rows to every other."""
    places = into.split(sizes)
    places[peers.place].copy_(mine)
    _exchange(peers, [mine] * len(sizes), places)


def _exchange(peers: Peers, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor] | torch.Tensor) -> None:
    """Send `sent[place]` to every other place, and receive `received[place]` from it."""
    operations = []
    for place, (mine, theirs) in enumerate(zip(sent, received, strict=True)):
        if place != peers.place:
            operations += [*peers.send(mine, place), *peers.receive(theirs, place)]
    finish(start(operations))
