"""The process group of a mesh, and this rank's number in it: found once, known on every call.

There is one group for everything: an all-to-all among the ranks of one place is one among all of them in which the
others take nothing, and what goes around a ring is sent from rank to rank. So no rank waits for others to make a group,
whose name torch derives from how many a process has made before.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from polyattn.distributed.parallel import SequenceParallel
from polyattn.errors import UnsupportedRequest

#: Meshes with their degrees; a process has one or two. The oldest are dropped.
_LIMIT = 32
_found: dict[Any, Ranks] = {}


@dataclass(frozen=True, eq=False)
class Ranks:
    """The ranks that share a sequence: their group, this rank's number in it, and the global rank of each.

    per_host  how many of them a host has, as far as torchrun says; it divides them
    number    tells these ranks from others that this process has been among
    """

    group: dist.ProcessGroup
    rank: int
    members: tuple[int, ...]
    per_host: int
    number: int = field(default_factory=count(1).__next__)
    met: set[str] = field(default_factory=set)

    def meet(self, device: torch.device) -> None:
        """On first use of a device, one tiny collective.

        NCCL connects a group when its first operation is called, by all of its ranks; the first operation of a ring may
        have nothing to pass for some of them.
        """
        if device.type not in ("cpu", "meta") and device.type not in self.met:
            dist.all_reduce(torch.zeros(1, device=device), group=self.group)
            self.met.add(device.type)


def ranks_of(parallel: SequenceParallel) -> Ranks:
    """The ranks of a `SequenceParallel`; UnsupportedRequest where there are not as many as it asks for."""
    if not dist.is_available() or not dist.is_initialized():
        raise UnsupportedRequest(
            f"parallel: {parallel.world_size} ranks were asked for ({parallel.degrees}), but torch.distributed is not "
            "initialised; call torch.distributed.init_process_group first"
        )
    mesh = parallel.mesh
    group = dist.group.WORLD if mesh is None else mesh if isinstance(mesh, dist.ProcessGroup) else _group_of(mesh)
    key = (id(group), parallel.world_size)
    found = _found.get(key)
    if found is None or found.group is not group:  # another group may lie where a destroyed one lay
        found = _check(parallel, group)
        while len(_found) >= _LIMIT:
            del _found[next(iter(_found))]
        _found[key] = found
    return found


def _group_of(mesh: Any) -> dist.ProcessGroup:
    if not hasattr(mesh, "get_group") or not hasattr(mesh, "ndim"):
        raise TypeError(f"mesh: a DeviceMesh, a process group or None is needed, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise UnsupportedRequest(
            f"mesh: one axis is needed, which ulysses, ring and gather divide among them, got {mesh.ndim}; slice it, "
            "mesh['sp'], or flatten two axes into one"
        )
    group: dist.ProcessGroup = mesh.get_group()
    return group


def _check(parallel: SequenceParallel, group: dist.ProcessGroup | None) -> Ranks:
    assert group is not None
    members = tuple(dist.get_process_group_ranks(group))
    if len(members) != parallel.world_size:
        where = "default group" if parallel.mesh is None else "mesh"
        raise UnsupportedRequest(
            f"parallel: {parallel.world_size} ranks were asked for ({parallel.degrees}), "
            f"but the {where} has {len(members)}"
        )
    return Ranks(group, dist.get_rank(group), members, _per_host(members))


def _per_host(members: tuple[int, ...]) -> int:
    """Of the ranks of the first member's host; all of them where nobody says how many processes a host runs."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    each = int(told) if told.isdecimal() and int(told) else max(members) + 1
    near = sum(member // each == members[0] // each for member in members)
    return near if len(members) % near == 0 else 1
