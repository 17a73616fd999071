"""Ulysses: heads exchanged for rows and back, one all-to-all each way, differentiable.

Tensors that have the same rows travel together. What is received is one buffer [rows, B, width], of which q, k, v are
views: any strides serve a slot. All of it happens on the caller's stream, so that no memory has to be recorded for
another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from polyattn.distributed.failure import Communicating
from polyattn.distributed.moves import Kind, Moves
from polyattn.distributed.rows import Ranges, size


@dataclass(frozen=True, eq=False)
class Bundle:
    """Tensors that have the same rows; `lead` and `trail` rows beside those are left for the caller to fill."""

    moves: Moves
    kinds: tuple[Kind, ...]
    lead: int
    trail: int

    @property
    def rows(self) -> int:
        return self.lead + sum(self.moves.attended_rows) + self.trail


def to_heads(
    bundles: Sequence[Bundle], tensors: Sequence[torch.Tensor], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """Shards [B,rows,H,D] of all heads -> [B, lead + all rows + trail, own heads, D], views of one buffer a bundle."""
    buffers = _ToHeads.apply(tuple(bundles), group, *tensors)  # type: ignore[no-untyped-call]
    views = []
    left = list(tensors)
    for bundle, buffer in zip(bundles, buffers, strict=True):
        column = 0
        for kind in bundle.kinds:
            tensor = left.pop(0)
            heads, width = bundle.moves.own_width(kind), tensor.shape[-1]
            part = buffer.narrow(2, column, heads * width).unflatten(2, (heads, width))
            views.append(part.transpose(0, 1))
            column += heads * width
    return views


def from_heads(answers: Sequence[torch.Tensor], moves: Moves, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Each [B, attended rows, own heads, D] -> [B, held rows, all heads, D]."""
    return list(_FromHeads.apply(moves, group, *answers))  # type: ignore[no-untyped-call]


class _ToHeads(torch.autograd.Function):
    """One function for all bundles: on every rank their gradients must travel in the same order."""

    @staticmethod
    def forward(
        ctx: Any, bundles: tuple[Bundle, ...], group: dist.ProcessGroup, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.bundles, ctx.group = bundles, group
        ctx.shapes = [tensor.shape for tensor in tensors]
        left, buffers = list(tensors), []
        for bundle in bundles:
            mine = [left.pop(0) for _ in bundle.kinds]
            buffers.append(_given_away(bundle, mine, group))
        return tuple(buffers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        shapes, found = list(ctx.shapes), []
        with Communicating(ctx.group, "the backward of ulysses"):
            for bundle, grad in zip(ctx.bundles, grads, strict=True):
                found += _taken_back(bundle, grad, [shapes.pop(0) for _ in bundle.kinds], ctx.group)
        return None, None, *found


class _FromHeads(torch.autograd.Function):
    """One function for output and LSE, for the same reason."""

    @staticmethod
    def forward(ctx: Any, moves: Moves, group: dist.ProcessGroup, *answers: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.moves, ctx.group, ctx.shapes = moves, group, [answer.shape for answer in answers]
        return tuple(_returned(moves, answer, group) for answer in answers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with Communicating(ctx.group, "the backward of ulysses"):
            found = [_summed(ctx.moves, grad, shape, ctx.group) for grad, shape in zip(grads, ctx.shapes, strict=True)]
        return None, None, *found


def _given_away(bundle: Bundle, tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> torch.Tensor:
    moves, kinds = bundle.moves, bundle.kinds
    batch, widths = tensors[0].shape[0], [tensor.shape[-1] for tensor in tensors]
    width = sum(moves.own_width(kind) * each for kind, each in zip(kinds, widths, strict=True))
    buffer = tensors[0].new_empty(bundle.rows, batch, width)
    dist.all_to_all_single(
        buffer.narrow(0, bundle.lead, sum(moves.attended_rows)).view(-1),
        _packed(tensors, kinds, moves),
        [n * batch * width for n in moves.attended_rows],
        _lent_sizes(moves, kinds, widths, batch),
        group=group,
    )
    return buffer


def _taken_back(
    bundle: Bundle, grad: torch.Tensor, shapes: Sequence[torch.Size], group: dist.ProcessGroup
) -> list[torch.Tensor]:
    """The gradient of what was given away."""
    moves, kinds = bundle.moves, bundle.kinds
    batch = grad.shape[1]
    sizes = _lent_sizes(moves, kinds, [shape[-1] for shape in shapes], batch)
    received = grad.new_empty(sum(sizes))
    dist.all_to_all_single(
        received,
        grad.narrow(0, bundle.lead, sum(moves.attended_rows)).reshape(-1),
        sizes,
        [n * batch * grad.shape[2] for n in moves.attended_rows],
        group=group,
    )
    grads = [grad.new_empty(shape) for shape in shapes]
    _unpack(received, grads, kinds, moves)
    return grads


def _returned(moves: Moves, answer: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    batch, _, own, width = answer.shape
    sizes = _lent_sizes(moves, ("q",), (width,), batch)
    received = answer.new_empty(sum(sizes))
    dist.all_to_all_single(
        received,
        _by_member(answer, moves.attended),
        sizes,
        [n * batch * own * width for n in moves.attended_rows],
        group=group,
    )
    result = answer.new_empty(batch, _held_rows(moves), moves.heads.total, width)
    _unpack(received, [result], ("q",), moves)
    return result


def _summed(moves: Moves, grad: torch.Tensor, shape: torch.Size, group: dist.ProcessGroup) -> torch.Tensor:
    """The gradient of an answer: of rows that every rank holds, what each of them says is added up."""
    batch, rows, own, width = shape
    sizes = [n * batch * own * width for n in moves.attended_rows]
    received = grad.new_empty(sum(sizes))
    dist.all_to_all_single(
        received,
        _packed([grad], ("q",), moves),
        sizes,
        _lent_sizes(moves, ("q",), (width,), batch),
        group=group,
    )
    total = grad.new_zeros(rows, batch, own, width)
    for part, ranges in zip(received.split(sizes), moves.attended, strict=True):
        _add(total, part.view(size(ranges), batch, own, width), ranges)
    return total.transpose(0, 1)


def _lent_sizes(moves: Moves, kinds: Sequence[Kind], widths: Sequence[int], batch: int) -> list[int]:
    """Elements of each member's segment, as this rank packs it."""
    return [
        rows * batch * sum(moves.width(member, kind) * width for kind, width in zip(kinds, widths, strict=True))
        for member, rows in enumerate(moves.lent_rows)
    ]


def _held_rows(moves: Moves) -> int:
    """Rows that this rank holds: every one is attended to by somebody."""
    return max((end for ranges in moves.lent for _, end in ranges), default=0)


def _segments(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], kinds: Sequence[Kind], moves: Moves
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(segment's part, tensor's part), shaped alike, for every member and tensor: views to copy either way."""
    batch, widths = tensors[0].shape[0], [tensor.shape[-1] for tensor in tensors]
    if moves.alike:
        return _segments_alike(flat, tensors, kinds, moves)
    pairs = []
    sizes = _lent_sizes(moves, kinds, widths, batch)
    for member, segment in enumerate(flat.split(sizes)):
        rows = moves.lent_rows[member]
        if not segment.numel():
            continue
        segment, column = segment.view(rows, batch, -1), 0
        for tensor, kind, width in zip(tensors, kinds, widths, strict=True):
            first, last = moves.span(member, kind)
            part = segment.narrow(2, column, (last - first) * width).unflatten(2, (last - first, width))
            column += (last - first) * width
            at = 0
            for start, end in moves.lent[member]:
                held = tensor[:, start:end, first:last].transpose(0, 1)
                pairs.append((part.narrow(0, at, end - start), held))
                at += end - start
    return pairs


def _segments_alike(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], kinds: Sequence[Kind], moves: Moves
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One copy a tensor for all members."""
    busy = moves.busy
    members, batch = len(busy), tensors[0].shape[0]
    if flat.numel() == 0:
        return []
    ((start, end),) = moves.lent[busy[0]]
    rows = end - start
    whole = flat.view(members, rows, batch, -1)
    pairs, column = [], 0
    for tensor, kind in zip(tensors, kinds, strict=True):
        heads, width = moves.own_width(kind), tensor.shape[-1]
        part = whole.narrow(3, column, heads * width).unflatten(3, (heads, width))
        held = tensor.narrow(1, start, rows).unflatten(2, (members, heads)).permute(2, 1, 0, 3, 4)
        pairs.append((part, held))
        column += heads * width
    return pairs


def _packed(tensors: Sequence[torch.Tensor], kinds: Sequence[Kind], moves: Moves) -> torch.Tensor:
    """What each member is sent, [its rows, B, its heads of every tensor], one after the other."""
    widths = [tensor.shape[-1] for tensor in tensors]
    flat = tensors[0].new_empty(sum(_lent_sizes(moves, kinds, widths, tensors[0].shape[0])))
    for part, held in _segments(flat, tensors, kinds, moves):
        part.copy_(held)
    return flat


def _unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor], kinds: Sequence[Kind], moves: Moves) -> None:
    """Put what each member sent where `_packed` would take it from."""
    for part, held in _segments(flat, tensors, kinds, moves):
        held.copy_(part)


def _by_member(out: torch.Tensor, attended: tuple[Ranges, ...]) -> torch.Tensor:
    """[B,S,h,D] as each member's rows [rows, B, h, D], flat; the tensor itself where that is how it lies."""
    rows = out.transpose(0, 1)
    ranges = [pair for member in attended for pair in member]
    bounds = [0, *(end for _, end in ranges)]
    in_order = [start for start, _ in ranges] == bounds[:-1] and bounds[-1] == rows.shape[0]
    if in_order:
        return rows.reshape(-1)
    parts = [rows[start:end] for start, end in ranges]
    return torch.cat(parts).reshape(-1) if parts else rows.new_empty(0)


def _add(total: torch.Tensor, part: torch.Tensor, ranges: Ranges) -> None:
    at = 0
    for start, end in ranges:
        total[start:end] += part[at : at + end - start]
        at += end - start
