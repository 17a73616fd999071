"""What travels around a ring: who passes which keys on at which step, and the two buffers that hold them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polyattn.distributed.parts import Part
from polyattn.distributed.peers import Peers, start


@dataclass(frozen=True, eq=False)
class RingPlan:
    """What one place does.

    parts    [step] what it attends to of the keys it then holds: its own and every rank's, then those of the places
             before it, one after the other
    sizes    [place] key rows that a place passes on
    wanted   [step] whether the keys of that step are still seen by this place or by one that they would reach after it
    lead     rows, before those that are passed on, of the keys that are this place's own
    """

    place: int
    parts: tuple[tuple[Part, ...], ...]
    sizes: tuple[int, ...]
    wanted: tuple[tuple[bool, ...], ...]
    lead: int

    @property
    def places(self) -> int:
        return len(self.sizes)

    @property
    def after(self) -> int:
        """The place that keys are passed on to."""
        return (self.place + 1) % self.places

    @property
    def before(self) -> int:
        """The place that they come from."""
        return (self.place - 1) % self.places

    def origin(self, step: int) -> int:
        """The place whose keys are here at a step."""
        return (self.place - step) % self.places

    def sends(self, step: int) -> bool:
        """Whether the keys of a step are passed on."""
        return step + 1 < self.places and self.wanted[self.origin(step)][step + 1] and self.sizes[self.origin(step)] > 0

    def receives(self, step: int) -> bool:
        """Whether the keys of the next step arrive during a step."""
        if step + 1 == self.places:
            return False
        origin = self.origin(step + 1)
        return self.wanted[origin][step + 1] and self.sizes[origin] > 0


def wanted_of(seen: list[list[bool]]) -> tuple[tuple[bool, ...], ...]:
    """[origin][step]: whether the place `step` after it, or a later one, sees its keys; `seen[place][origin]`."""
    places = len(seen)
    return tuple(
        tuple(any(seen[(origin + later) % places][origin] for later in range(step, places)) for step in range(places))
        for origin in range(places)
    )


class Chunks:
    """The keys and values that a place holds, in two buffers: one is read and sent on while the other fills."""

    def __init__(self, plan: RingPlan, peers: Peers, k: torch.Tensor, v: torch.Tensor) -> None:
        self.plan, self.peers, self.k, self.v = plan, peers, k, v
        self.batch, self.heads, self.widths = k.shape[0], k.shape[2], (k.shape[-1], v.shape[-1])
        self.buffers: list[torch.Tensor | None] = [None, None]

    def pass_on(self, step: int) -> list[Any]:
        """Start sending what is held, and receiving what comes next."""
        plan, peers = self.plan, self.peers
        operations: list[Any] = []
        if plan.sends(step):
            if step == 0:
                self._keep_own()
            operations += peers.send(self._chunk(step, plan.origin(step)), plan.after)
        if plan.receives(step):
            operations += peers.receive(self._chunk(step + 1, plan.origin(step + 1)), plan.before)
        return start(operations)

    def held(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values of a step."""
        if step == 0:
            return self.k, self.v
        return unpacked(self._chunk(step, self.plan.origin(step)), self.heads, self.widths)

    def _keep_own(self) -> None:
        """This place's own keys, straight into the buffer that they are sent from."""
        plan = self.plan
        own = unpacked(self._chunk(0, plan.place), self.heads, self.widths)
        for kept, tensor in zip(own, (self.k, self.v), strict=True):
            kept.copy_(tensor.narrow(1, plan.lead, plan.sizes[plan.place]))

    def _chunk(self, step: int, origin: int) -> torch.Tensor:
        buffer = self.buffers[step % 2]
        if buffer is None:
            width = self.heads * sum(self.widths)
            buffer = self.buffers[step % 2] = self.k.new_empty(max(self.plan.sizes), self.batch, width)
        return buffer.narrow(0, 0, self.plan.sizes[origin])


def packed(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """k and v [B,S,h,D] as [S, B, h*D + h*Dv], in one tensor; differentiable."""
    return torch.cat([tensor.transpose(0, 1).flatten(2) for tensor in (k, v)], dim=2)


def unpacked(chunk: torch.Tensor, heads: int, widths: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """k and v as views of what `packed` made."""
    keys = heads * widths[0]
    k, v = chunk.narrow(2, 0, keys), chunk.narrow(2, keys, heads * widths[1])
    return (
        k.unflatten(2, (heads, widths[0])).transpose(0, 1),
        v.unflatten(2, (heads, widths[1])).transpose(0, 1),
    )
