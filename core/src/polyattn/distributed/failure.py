"""What is said when a rank is gone: which call, among whom, and torch's own words as the cause."""

from __future__ import annotations

from types import TracebackType

import torch.distributed as dist

from polyattn.distributed.disagreement import rank_names


class PeerLost(RuntimeError):
    """A rank ended, or did not answer in time, while others needed it."""


class Communicating:
    """Exceptions of a collective inside are raised anew as `PeerLost`, with what was going on.

    `call` says which call it is (strategy, signature); it is turned into text only then. Errors that have nothing to do
    with communication pass unchanged. It costs a call about a microsecond.

        with Communicating(group, "ulysses=2, ring=2: q bfloat16 [1, 4608, 24, 128]"):
            dist.all_to_all_single(...)
    """

    __slots__ = ("call", "group")

    def __init__(self, group: dist.ProcessGroup, call: object) -> None:
        self.group, self.call = group, call

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and _is_communication(error, self.group):
            raise PeerLost(lost(self.group, self.call, str(error))) from error


def lost(group: dist.ProcessGroup, call: object, cause: str) -> str:
    """The text: who says it, of which call, among which ranks, and why."""
    from polyattn.distributed.agreement import waiting

    ranks = dist.get_process_group_ranks(group)
    first_line = cause.strip().partition("\n")[0]
    elsewhere = waiting(group)
    if elsewhere:
        return (
            f"parallel: rank {ranks.index(dist.get_rank())} of {len(ranks)} (global {rank_names(ranks)}) was alone in "
            f"{call}: the ranks do not make the same call, {elsewhere}. {first_line}"
        )
    return (
        f"parallel: rank {ranks.index(dist.get_rank())} of {len(ranks)} (global {rank_names(ranks)}) lost a peer in "
        f"{call}: another rank has ended or does not answer; its own log says why. {first_line}"
    )


def _is_communication(error: BaseException, group: dist.ProcessGroup) -> bool:
    """Backends have no error in common: torch's own class, or a RuntimeError that names the group's backend."""
    if isinstance(error, PeerLost) or not isinstance(error, RuntimeError):
        return False
    if isinstance(error, dist.DistError):
        return True
    return any(name in str(error).lower() for name in (*_backends(group), "connection closed", "connection reset"))


def _backends(group: dist.ProcessGroup) -> list[str]:
    """["gloo"], or several where a group has one a device type: "cpu:gloo,cuda:nccl"."""
    try:
        named = dist.get_backend_config(group)
    except (ValueError, RuntimeError):  # the group is gone already
        return []
    return [part.rpartition(":")[2].lower() for part in str(named).split(",") if part]
