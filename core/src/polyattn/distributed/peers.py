"""Ranks that pass rows to each other, each at its place: sends and receives, and waiting for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Peers:
    """The global ranks at all places, in order, and this rank's place; they speak in `group`, which may be larger."""

    group: dist.ProcessGroup
    members: tuple[int, ...]
    place: int

    @property
    def alone_in_group(self) -> bool:
        """Whether the group has no other rank, so that its collectives are theirs."""
        return len(self.members) == dist.get_world_size(self.group)

    def send(self, tensor: torch.Tensor, place: int) -> list[dist.P2POp]:
        """A send to a place; none where there is nothing to send."""
        return [dist.P2POp(dist.isend, tensor, self.members[place], self.group)] if tensor.numel() else []

    def receive(self, tensor: torch.Tensor, place: int) -> list[dist.P2POp]:
        """A receive from a place; none where there is nothing to receive."""
        return [dist.P2POp(dist.irecv, tensor, self.members[place], self.group)] if tensor.numel() else []


def start(operations: list[dist.P2POp]) -> list[Any]:
    """Start sends and receives together; what to wait for."""
    return dist.batch_isend_irecv(operations) if operations else []


def finish(works: Iterable[Any]) -> None:
    """Let the caller's stream, or its thread where there is none, wait for them."""
    for work in works:
        work.wait()
