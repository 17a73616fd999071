"""A structure that a request could have had: requests hold no content, so that its lengths are made up."""

from __future__ import annotations

from typing import Literal

import torch

from polyattn.door.request import Request
from polyattn.errors import UnsupportedRequest
from polyattn.structures import (
    BlockMap,
    KeyPadding,
    Mask,
    Packed,
    Paged,
    Spans,
    Structure,
    VideoLayout,
    VideoTiles,
)


def sample_structure(request: Request, device: torch.device) -> Structure | None:
    """A structure of the request's kind and facts, for tensors of its shapes; None for a plain dense request."""
    kind, keys = request.structure_kind, request.k.shape[-3]
    if request.structure_facts.video is not None:  # a dense request may stand in for video tiles
        return _video_tiles(request)
    if kind == "dense":
        return None
    if kind in ("key_padding", "prefix_kv"):
        return _key_padding(request, device)
    if kind in ("mask", "bias"):
        return _mask(request, device)
    if kind == "packed":
        return _packed(request, device)
    if kind == "spans":
        return Spans([[(0, 1)] if keys else []] * request.q.shape[0])
    if kind == "paged":
        return _paged(request, device)
    if kind == "block_map":
        return _block_map(request, device)
    raise UnsupportedRequest(f"no structure can be made up for a {kind} request")


def _key_padding(request: Request, device: torch.device) -> Structure:
    facts, width = request.structure_facts, request.k.shape[1]
    batch = facts.documents or request.k.shape[0]
    queries = facts.queries if facts.queries in ("same", "all") else None
    if facts.common_prefix is not None:
        return KeyPadding.from_lengths([facts.common_prefix] * batch, width, queries=queries)  # type: ignore[arg-type]
    if facts.host and facts.prefix:  # rows of two lengths, or it would be a common prefix
        kept = [width - row % 2 for row in range(batch)]
        return KeyPadding.from_lengths(kept, width, queries=queries)  # type: ignore[arg-type]
    keep = torch.ones(batch, width, dtype=torch.bool, device="cpu")
    keep[0, 0] = False  # not a prefix
    return KeyPadding.from_mask(keep if facts.host else keep.to(device), queries=queries)  # type: ignore[arg-type]


def _mask(request: Request, device: torch.device) -> Structure:
    facts = request.structure_facts
    shape = facts.mask_shape or (1, 1, 1, request.k.shape[1])
    if facts.mask_dtype == "bool":
        keep = torch.ones(shape, dtype=torch.bool, device="cpu" if facts.host else device)
        keep[..., -1:] = False  # it hides something
        return Mask(keep)
    bias = torch.zeros(shape, dtype=getattr(torch, facts.mask_dtype or "float32"), device=device)
    return Mask(bias.requires_grad_(facts.mask_grad))


def _packed(request: Request, device: torch.device) -> Structure:
    facts = request.structure_facts
    documents = facts.documents or 1
    lengths_q, lengths_k = (_shares(facts_.shape[0], documents) for facts_ in (request.q, request.k))
    keys = None if facts.same_lengths else lengths_k
    spans: list[list[tuple[int, int]]] | None = [[] for _ in lengths_k] if facts.spans else None
    capacity = (documents, max(lengths_q), max(lengths_k)) if facts.capacity else None
    on_host = Packed.from_lengths(lengths_q, keys, spans=spans, capacity=capacity)
    if facts.host:
        return on_host
    cu_k = None if keys is None else on_host.cu_k.to(device)
    max_k = None if keys is None else on_host.max_k
    return Packed.from_cu_seqlens(on_host.cu_q.to(device), cu_k, on_host.max_q, max_k)


def _paged(request: Request, device: torch.device) -> Structure:
    facts = request.structure_facts
    rows, (pages, page_size) = facts.documents or 1, request.k.shape[:2]
    entries = max(pages // rows, 1)
    table = [[(row * entries + entry) % pages for entry in range(entries)] for row in range(rows)]
    kept = [entries * page_size] * rows
    packed = facts.query_layout == "packed"
    asked = _shares(request.q.shape[0], rows) if packed else [min(request.q.shape[1], kept[0])] * rows
    new = None if facts.query_layout == "batched" else asked
    spans: list[list[tuple[int, int]]] | None = [[] for _ in range(rows)] if facts.spans else None
    if facts.host:
        return Paged(table, kept, new, spans)
    on_device = [None if data is None else torch.tensor(data, device=device) for data in (table, kept, new)]
    return Paged(*on_device)


def _video_tiles(request: Request) -> Structure:
    video = request.structure_facts.video
    assert video is not None
    prefix: list[int] = []
    for start, end in video.segments:
        if start == sum(prefix):  # else it lies after the video
            prefix.append(end - start)
    layout = VideoLayout(video.grid, tuple(prefix), used=video.used)
    fallback: Literal["dense", "error"] = "dense" if video.fallback == "dense" else "error"
    return VideoTiles(
        layout, video.tile, video.kept, None, video.keep_sparse_numerics, video.min_seq_len, fallback
    )  # fmt: skip


def _block_map(request: Request, device: torch.device) -> Structure:
    sides = request.structure_facts.blocks
    assert sides is not None
    rows = -(-request.q.shape[1] // sides[0])
    lists = torch.zeros(1, 1, rows, 1, dtype=torch.int32, device=device)
    return BlockMap(lists, torch.ones_like(lists[..., 0]), *sides)


def _shares(total: int, parts: int) -> list[int]:
    whole, rest = divmod(total, parts)
    return [whole + (part < rest) for part in range(parts)]
