"""What each member of an exchange is sent, in one buffer, and where what it sends goes: copies, no communication."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyattn.distributed.moves import Kind, Moves
from polyattn.distributed.rows import Ranges


def held_rows(moves: Moves) -> int:
    """Rows that this rank holds: every one is attended to by somebody."""
    return max((end for ranges in moves.lent for _, end in ranges), default=0)


def packed(tensors: Sequence[torch.Tensor], kinds: tuple[Kind, ...], moves: Moves) -> torch.Tensor:
    """What each member is sent, [its rows, B, its heads of every tensor], one after the other."""
    widths = tuple(tensor.shape[-1] for tensor in tensors)
    flat = tensors[0].new_empty(sum(moves.lent_sizes(kinds, widths, tensors[0].shape[0])))
    for part, held in _segments(flat, tensors, kinds, moves):
        part.copy_(held)
    return flat


def unpack(flat: torch.Tensor, tensors: Sequence[torch.Tensor], kinds: tuple[Kind, ...], moves: Moves) -> None:
    """Put what each member sent where `packed` would take it from."""
    for part, held in _segments(flat, tensors, kinds, moves):
        held.copy_(part)


def by_member(out: torch.Tensor, attended: tuple[Ranges, ...]) -> torch.Tensor:
    """[B,S,h,D] as each member's rows [rows, B, h, D], flat; the tensor itself where that is how it lies."""
    rows = out.transpose(0, 1)
    ranges = [pair for member in attended for pair in member]
    bounds = [0, *(end for _, end in ranges)]
    in_order = [start for start, _ in ranges] == bounds[:-1] and bounds[-1] == rows.shape[0]
    if in_order:
        return rows.reshape(-1)
    parts = [rows[start:end] for start, end in ranges]
    return torch.cat(parts).reshape(-1) if parts else rows.new_empty(0)


def add(total: torch.Tensor, part: torch.Tensor, ranges: Ranges) -> None:
    """Add rows that lie one after the other in `part` to those rows of `total`."""
    at = 0
    for start, end in ranges:
        total[start:end] += part[at : at + end - start]
        at += end - start


def _segments(
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], kinds: tuple[Kind, ...], moves: Moves
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(segment's part, tensor's part), shaped alike, for every member and tensor: views to copy either way."""
    if moves.alike:
        return _segments_alike(flat, tensors, kinds, moves)
    batch, widths = tensors[0].shape[0], tuple(tensor.shape[-1] for tensor in tensors)
    pairs = []
    sizes = moves.lent_sizes(kinds, widths, batch)
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
    flat: torch.Tensor, tensors: Sequence[torch.Tensor], kinds: tuple[Kind, ...], moves: Moves
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
        (first, last), width = moves.span(busy[0], kind), tensor.shape[-1]
        part = part_of(whole, 3, column, (last - first) * width).unflatten(3, (last - first, width))
        held = part_of(tensor, 1, start, rows).unflatten(2, (members, tensor.shape[2] // members))
        pairs.append((part, part_of(held, 3, first, last - first).permute(2, 1, 0, 3, 4)))
        column += (last - first) * width
    return pairs


def part_of(tensor: torch.Tensor, axis: int, start: int, count: int) -> torch.Tensor:
    """`narrow`, which costs some microseconds, only where it leaves something out."""
    return tensor if count == tensor.shape[axis] else tensor.narrow(axis, start, count)
