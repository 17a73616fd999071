"""q, k, v and the gate as one rank holds them: rows that every rank holds, its shard, rows that every rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polyattn.distributed.glued import Parts, glued_parts
from polyattn.distributed.joint import Replicated


@dataclass(frozen=True, eq=False)
class Lane:
    """One of q, k, v or the gate on this rank, [B,rows,H,D] each: `before` and `after` are the same on every rank."""

    before: tuple[torch.Tensor, ...]
    shard: torch.Tensor
    after: tuple[torch.Tensor, ...]
    given: torch.Tensor | None = None

    @property
    def lead(self) -> int:
        return sum(part.shape[1] for part in self.before)

    @property
    def trail(self) -> int:
        return sum(part.shape[1] for part in self.after)

    @property
    def rows(self) -> int:
        return self.lead + self.shard.shape[1] + self.trail

    @property
    def counts(self) -> tuple[int, int, int]:
        """Rows before, of, and after the shard."""
        return self.lead, self.shard.shape[1], self.trail

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All parts, in order."""
        return (*self.before, self.shard, *self.after)

    def to(self, dtype: torch.dtype) -> Lane:
        """The same in another dtype."""
        before, after = (tuple(part.to(dtype) for part in parts) for parts in (self.before, self.after))
        return Lane(before, self.shard.to(dtype), after, None if self.given is None else self.given.to(dtype))

    def whole(self) -> torch.Tensor:
        """All rows in one tensor: the caller's own where nothing was given apart."""
        if self.given is not None:
            return self.given
        parts = self.tensors()
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


@dataclass(frozen=True, eq=False)
class Lanes:
    """What one rank holds of a call."""

    q: Lane
    k: Lane
    v: Lane
    gate: Lane | None = None

    def all(self) -> tuple[Lane, ...]:
        return (self.q, self.k, self.v) if self.gate is None else (self.q, self.k, self.v, self.gate)

    def to(self, dtype: torch.dtype) -> Lanes:
        """All of them in another dtype."""
        return Lanes(*(lane.to(dtype) for lane in self.all()))


def lanes_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, joint: Any, replicated: Any
) -> tuple[Lane, Lane, Lane]:
    """The lanes of q, k, v [B,S,H,D] or packed [T,H,D]; TypeError or ValueError where parts do not fit."""
    parts = glued_parts(q, k, v, joint=joint, replicated=replicated)
    prefix, suffix, kv_prefix, complete = _counts(replicated)
    _check_queries(q, prefix, suffix)
    keys = (0, 0) if complete else (prefix + kv_prefix, suffix)
    return (
        _lane(parts, 0, (prefix, suffix)),
        _lane(parts, 1, keys),
        _lane(parts, 2, keys),
    )


def lane_like(tensor: torch.Tensor, like: Lane) -> Lane:
    """A tensor of the output's rows (a gate) cut where the queries are; rows past theirs are dropped."""
    rows = like.lead + like.shard.shape[1]
    after = tensor.narrow(1, rows, like.trail)
    return Lane(
        (tensor.narrow(1, 0, like.lead),), tensor.narrow(1, like.lead, rows - like.lead), (after,),
        tensor.narrow(1, 0, rows + like.trail),
    )  # fmt: skip


def _counts(replicated: Replicated | None) -> tuple[int, int, int, bool]:
    if replicated is None:
        return 0, 0, 0, False
    stated = (replicated.prefix, replicated.suffix, replicated.kv_prefix)
    prefix, suffix, kv_prefix = (rows if isinstance(rows, int) else 0 for rows in stated)
    return prefix, suffix, kv_prefix, replicated.kv


def _check_queries(q: torch.Tensor, prefix: int, suffix: int) -> None:
    if prefix + suffix > q.shape[-3]:
        raise ValueError(
            f"replicated: prefix={prefix} and suffix={suffix} are counted among the rows of q, which has {q.shape[-3]}"
        )


def _lane(parts: Parts, letter: int, counts: tuple[int, int]) -> Lane:
    """`counts`: how many rows of the sequence itself, at its front and its end, every rank holds."""
    before: list[torch.Tensor] = []
    after: list[torch.Tensor] = []
    sequence: torch.Tensor | None = None
    for name, tensors in parts:
        tensor = tensors[letter]
        if tensor is None:
            continue
        tensor = tensor if tensor.dim() == 4 else tensor.unsqueeze(0)
        if name == "the sequence":
            sequence = tensor
        else:
            (before if sequence is None else after).append(tensor)
    assert sequence is not None
    first, last = counts
    rows = sequence.shape[1] - first - last
    given = None if before or after else sequence
    if first:
        before.append(sequence.narrow(1, 0, first))
    if last:
        after.insert(0, sequence.narrow(1, first + rows, last))
    shard = sequence.narrow(1, first, rows) if first or last else sequence
    return Lane(tuple(before), shard, tuple(after), given)
