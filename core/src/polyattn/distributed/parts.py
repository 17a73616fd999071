"""A global structure's part for some queries and some keys, from host facts: what a call on one rank is told."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby

import torch

from polyattn.distributed.rows import Range, Ranges, globally, located, overlap, size
from polyattn.distributed.visible import Band, Piece, pieces_of, sides
from polyattn.structures import BlockMap, Dense, KeyPadding, Mask, Packed, Spans, Structure
from polyattn.structures.host_data import on_host
from polyattn.structures.lasting import lasting
from polyattn.structures.spans import segments_of

Sides = tuple[int | None, int | None]


@dataclass(frozen=True, eq=False)
class Part:
    """One ordinary call: which local rows, and the structure that holds for them."""

    piece: Piece
    structure: Structure | None


def why_whole(structure: Structure | None) -> str | None:
    """Why a structure cannot be cut along rows, so that only ranks that hold every row can attend with it."""
    if structure is None or isinstance(structure, Dense):
        return None
    name = type(structure).__name__
    if isinstance(structure, Packed):
        if structure.capacity is not None:
            return "Packed(capacity=): its lengths may change after the ranks have agreed on who sees what"
        if structure.lengths_q is None:
            return "Packed: boundaries that only the device knows cannot be cut on the host"
        return None
    if isinstance(structure, Spans):
        return None if structure.query_ranges is None else "Spans(query_ranges=): spans of a parallel call are global"
    if isinstance(structure, (KeyPadding, Mask)):
        return None
    return f"{name}: it has no part for some of the rows"


def bands_of(structure: Structure | None, causal: bool, window: Sides | None, queries: int, keys: int) -> list[Band]:
    """Who may see whom, apart from keys that padding or a mask hides, of a structure that can be cut."""
    left, right = sides(causal, window)
    if isinstance(structure, Packed):
        return _documents(structure, left, right)
    if isinstance(structure, Spans):
        return _spans(structure, queries, keys)
    return [Band((0, queries), (0, keys), keys - queries, left, right)]


def parts_of(structure: Structure | None, bands: list[Band], q_rows: Ranges, k_rows: Ranges) -> tuple[Part, ...]:
    """The calls in which query rows see what they may of key rows; none where all of it is hidden."""
    found = []
    for piece in pieces_of(bands, q_rows, k_rows):
        visible, part = _within(structure, piece, q_rows, k_rows)
        if visible:
            found.append(Part(piece, part))
    return tuple(found)


def of_heads(structure: Structure | None, heads: Range) -> Structure | None:
    """The structure for some of the query heads."""
    if isinstance(structure, Mask) and structure.tensor.shape[1] > 1:
        return _mask(structure, structure.tensor[:, heads[0] : heads[1]])
    if isinstance(structure, BlockMap) and structure.lists.shape[1] > 1:
        lists, counts = (tensor[:, heads[0] : heads[1]] for tensor in (structure.lists, structure.counts))
        return BlockMap(lists, counts, structure.block_q, structure.block_k, structure.sizes)
    return structure


@lasting
def unanswered(structure: Structure | None, rows: Ranges, device: torch.device) -> torch.Tensor | None:
    """Bool [B, rows] on the device: padded query rows, whose answer is 0; None where there are none."""
    if not isinstance(structure, KeyPadding) or structure.queries == "all":
        return None
    kept = _columns(structure.keep, rows)
    return None if on_host(kept) and bool(kept.all()) else (~kept).to(device)


def _documents(structure: Packed, left: int | None, right: int | None) -> list[Band]:
    assert structure.lengths_q is not None
    assert structure.lengths_k is not None
    bands: list[Band] = []
    ends = zip(accumulate(structure.lengths_q), accumulate(structure.lengths_k), strict=True)
    for place, (lengths, (q_end, k_end)) in enumerate(
        zip(zip(structure.lengths_q, structure.lengths_k, strict=True), ends, strict=True)
    ):
        q, k = (q_end - lengths[0], q_end), (k_end - lengths[1], k_end)
        if structure.spans is None:
            bands.append(Band(q, k, k_end - q_end, left, right, document=True))
        else:
            bands += [
                Band(
                    (q[0] + segment.start, q[0] + segment.end),
                    (k[0], k[0] + segment.kv_end),
                    k[0] + segment.kv_end - q[0] - segment.end,
                    right=0 if segment.causal else None,
                )
                for segment in segments_of(structure.spans[place], None, *lengths)
            ]
    return bands


def _spans(structure: Spans, queries: int, keys: int) -> list[Band]:
    bands: list[Band] = []
    start = 0
    for full, alike in groupby(structure.full):
        count = len(tuple(alike))
        batch = None if count == len(structure.full) else (start, start + count)
        bands += [
            Band(
                (segment.start, segment.end),
                (0, segment.kv_end),
                segment.kv_end - segment.end,
                right=0 if segment.causal else None,
                batch=batch,
            )
            for segment in segments_of(full, None, queries, keys)
        ]
        start += count
    return bands


@lasting
def _within(structure: Structure | None, piece: Piece, q_rows: Ranges, k_rows: Ranges) -> tuple[bool, Structure | None]:
    """Whether anything of a piece may be visible, and the structure that holds in it."""
    if piece.documents:
        queries, keys = zip(*piece.documents, strict=True)
        return True, Packed.from_lengths(queries, None if queries == keys else keys)
    if isinstance(structure, KeyPadding):
        return _padding(structure, globally(piece.k, k_rows))
    if isinstance(structure, Mask):
        tensor = _columns(structure.tensor, globally(piece.k, k_rows))
        if tensor.shape[2] > 1:
            tensor = _columns(tensor, globally(piece.q, q_rows), axis=2)
        if structure.facts.host and not structure.additive and not bool(tensor.any()):
            return False, None
        part = _mask(structure, tensor)
        return True, None if part.facts.full else part
    return True, None


def _padding(structure: KeyPadding, rows: Ranges) -> tuple[bool, Structure | None]:
    if structure.ranges is None:
        return True, KeyPadding.from_mask(_columns(structure.keep, rows), queries="all")
    kept = [located(overlap(ranges, rows), rows) for ranges in structure.ranges]
    keys = size(rows)
    if all(size(ranges) == keys for ranges in kept):
        return True, None
    return any(kept), KeyPadding.from_ranges(kept, keys, queries="all")


def _columns(tensor: torch.Tensor, rows: Ranges, axis: int = -1) -> torch.Tensor:
    """Some rows of an axis; a view where they follow each other."""
    slices = [tensor.narrow(axis, start, end - start) for start, end in rows]
    return slices[0] if len(slices) == 1 else torch.cat([tensor.narrow(axis, 0, 0), *slices], axis)


def _mask(structure: Mask, tensor: torch.Tensor) -> Mask:
    """A mask like `structure` over part of its tensor, which was checked already."""
    return Mask.from_anchors((tensor,), (), str(4 if structure.given_rank == 4 else structure.given_rank))
