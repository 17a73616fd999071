"""Ulysses: a group of heads exchanged for rows and back, one all-to-all each way, started and waited for apart.

Tensors that have the same rows travel together. What is received is one buffer [rows, B, width], of which q, k, v are
views: any strides serve a slot. Buffers are made, waited for and dropped on the caller's stream, and a work that is not
waited for yet holds its own: no memory has to be recorded for a collective's stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from polyattn.distributed.failure import Communicating
from polyattn.distributed.moves import Kind, Moves
from polyattn.distributed.packing import add, by_member, held_rows, packed, part_of, unpack
from polyattn.distributed.rows import size

_BACKWARD = "the backward of ulysses"


@dataclass(frozen=True, eq=False)
class Bundle:
    """Tensors that have the same rows; `lead` and `trail` rows beside those are left for the caller to fill."""

    moves: Moves
    kinds: tuple[Kind, ...]
    lead: int
    trail: int

    @property
    def rows(self) -> int:
        return self.lead + self.moves.attended_total + self.trail

    def received(self, buffer: torch.Tensor) -> torch.Tensor:
        """The part of a buffer that other ranks fill."""
        return part_of(buffer, 0, self.lead, self.moves.attended_total)

    def views(self, buffer: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
        """Each tensor [B, lead + all rows + trail, own heads, D] in the buffer."""
        found, column = [], 0
        for kind, width in zip(self.kinds, widths, strict=True):
            heads = self.moves.own_width(kind)
            part = part_of(buffer, 2, column, heads * width).unflatten(2, (heads, width))
            found.append(part.transpose(0, 1))
            column += heads * width
        return found


@dataclass(frozen=True, eq=False)
class Road:
    """Among whom, and whether a journey is `overlapped` with what the caller does until it waits for it.

    Where nothing is overlapped, the collective may run on the caller's own stream, which costs less.
    """

    group: dist.ProcessGroup
    overlapped: bool


class Journey:
    """One all-to-all that has been started."""

    __slots__ = ("_sent", "_work", "received")

    def __init__(
        self, road: Road, received: torch.Tensor, sent: torch.Tensor, into: list[int], out_of: list[int]
    ) -> None:
        self.received, self._sent = received, sent
        self._work: Any = dist.all_to_all_single(
            received, sent, into, out_of, group=road.group, async_op=road.overlapped
        )

    def end(self) -> torch.Tensor:
        """What was received, once the caller's stream (or thread) waits for it."""
        if self._work is not None:
            self._work.wait()
        return self.received


class Shards:
    """Tensors [B,rows,H,D] of all heads, of which each group takes its own; backward, each fills in their gradients."""

    def __init__(self) -> None:
        self.tensors: tuple[torch.Tensor, ...] = ()
        self.gradients: list[torch.Tensor] = []
        self.shapes: list[torch.Size] = []

    def taken(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the groups send."""
        self.tensors, self.shapes = tensors, [tensor.shape for tensor in tensors]
        return ()

    def given(self) -> tuple[torch.Tensor, ...]:
        """Backward: all gradients, once every group has arrived."""
        whole, self.gradients = tuple(self.gradients), []
        return whole


class ToHeads:
    """A group of heads of the shards on its way to the ranks that compute it; backward, gradients on their way home.

    `leave` and `arrive` are one step each, and so are, backward, `gradients_leave` and `gradients_arrive`.
    """

    def __init__(self, bundles: Sequence[Bundle], road: Road, shards: Shards) -> None:
        self.bundles, self.road, self.shards = bundles, road, shards
        self._journeys: list[Journey] = []
        self._buffers: list[torch.Tensor] = []

    def leave(self) -> tuple[torch.Tensor, ...]:
        """Pack and send."""
        for bundle, mine in self._bundled(self.shards.tensors):
            moves, batch, widths = bundle.moves, mine[0].shape[0], tuple(tensor.shape[-1] for tensor in mine)
            width = sum(moves.own_width(kind) * each for kind, each in zip(bundle.kinds, widths, strict=True))
            buffer = mine[0].new_empty(bundle.rows, batch, width)
            into = [n * batch * width for n in moves.attended_rows]
            lent = moves.lent_sizes(bundle.kinds, widths, batch)
            sent = packed(mine, bundle.kinds, moves)
            self._buffers.append(buffer)
            self._journeys.append(Journey(self.road, bundle.received(buffer).view(-1), sent, into, lent))
        return ()

    def arrive(self) -> tuple[torch.Tensor, ...]:
        """A buffer for each bundle."""
        _end(self._journeys)
        buffers, self._buffers = tuple(self._buffers), []
        return buffers

    def gradients_leave(self, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send each rank what is said of its rows."""
        _end(self._journeys)  # of a backward that did not reach the shards
        with Communicating(self.road.group, _BACKWARD):
            for (bundle, shapes), grad in zip(self._bundled(self.shards.shapes), grads, strict=True):
                moves, batch, width = bundle.moves, *grad.shape[1:]
                lent = moves.lent_sizes(bundle.kinds, tuple(shape[-1] for shape in shapes), batch)
                sizes = [n * batch * width for n in moves.attended_rows]
                received = grad.new_empty(sum(lent))
                self._journeys.append(Journey(self.road, received, bundle.received(grad).reshape(-1), lent, sizes))
        return ()

    def gradients_arrive(self) -> tuple[torch.Tensor, ...]:
        """Fill in the heads of this group."""
        with Communicating(self.road.group, _BACKWARD):
            received = _end(self._journeys)
        if not self.shards.gradients:
            self.shards.gradients = [received[0].new_empty(shape) for shape in self.shards.shapes]
        for (bundle, grads), flat in zip(self._bundled(self.shards.gradients), received, strict=True):
            unpack(flat, grads, bundle.kinds, bundle.moves)
        return ()

    def _bundled(self, each: Sequence[Any]) -> Iterator[tuple[Bundle, list[Any]]]:
        """Each bundle with what belongs to its tensors."""
        left = iter(each)
        for bundle in self.bundles:
            yield bundle, [next(left) for _ in bundle.kinds]


class Answers:
    """Output and, where asked for, LSE of this rank's rows [B, held rows, H, D]; each group fills in its heads."""

    def __init__(self) -> None:
        self.whole: list[torch.Tensor] = []
        self.gradients: tuple[torch.Tensor, ...] = ()

    def given(self) -> tuple[torch.Tensor, ...]:
        """All of them, once every group has arrived."""
        whole, self.whole = tuple(self.whole), []
        return whole

    def taken(self, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Backward: what the groups send on."""
        self.gradients = grads
        return ()


class FromHeads:
    """Answers [B, attended rows, own heads, D] of a group on their way home; backward, gradients on their way here."""

    def __init__(self, moves: Moves, road: Road, answers: Answers) -> None:
        self.moves, self.road, self.answers = moves, road, answers
        self._shapes: list[torch.Size] = []
        self._journeys: list[Journey] = []

    def leave(self, *mine: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Send each rank its rows."""
        moves = self.moves
        self._shapes = [answer.shape for answer in mine]
        for answer in mine:
            batch, _, own, width = answer.shape
            sizes = moves.lent_sizes(("q",), (width,), batch)
            into = [n * batch * own * width for n in moves.attended_rows]
            received = answer.new_empty(sum(sizes))
            self._journeys.append(Journey(self.road, received, by_member(answer, moves.attended), sizes, into))
        return ()

    def arrive(self) -> tuple[torch.Tensor, ...]:
        """Fill in the heads of this group."""
        received = _end(self._journeys)
        if not self.answers.whole:
            rows, heads = held_rows(self.moves), self.moves.heads.of[0]
            self.answers.whole = [
                flat.new_empty(shape[0], rows, heads, shape[3])
                for flat, shape in zip(received, self._shapes, strict=True)
            ]
        for flat, whole in zip(received, self.answers.whole, strict=True):
            unpack(flat, [whole], ("q",), self.moves)
        return ()

    def gradients_leave(self) -> tuple[torch.Tensor, ...]:
        """Send the gradient of each head to the rank that computed it."""
        moves = self.moves
        with Communicating(self.road.group, _BACKWARD):
            for grad, (batch, _, own, width) in zip(self.answers.gradients, self._shapes, strict=True):
                sizes = [n * batch * own * width for n in moves.attended_rows]
                sent = packed([grad], ("q",), moves)
                lent = moves.lent_sizes(("q",), (width,), batch)
                self._journeys.append(Journey(self.road, grad.new_empty(sum(sizes)), sent, sizes, lent))
        return ()

    def gradients_arrive(self) -> tuple[torch.Tensor, ...]:
        """Of rows that every rank holds, what each of them says is added up."""
        found, moves = [], self.moves
        with Communicating(self.road.group, _BACKWARD):
            for received, (batch, rows, own, width) in zip(_end(self._journeys), self._shapes, strict=True):
                total = received.new_zeros(rows, batch, own, width)
                parts = received.split([n * batch * own * width for n in moves.attended_rows])
                for part, ranges in zip(parts, moves.attended, strict=True):
                    add(total, part.view(size(ranges), batch, own, width), ranges)
                found.append(total.transpose(0, 1))
        return tuple(found)


def _end(journeys: list[Journey]) -> list[torch.Tensor]:
    received = [journey.end() for journey in journeys]
    journeys.clear()
    return received
