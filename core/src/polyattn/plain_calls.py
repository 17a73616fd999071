"""Plain calls of what a slot claims, as requests: they tell whether a machine lets it run, before there is a tensor."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts, TensorFacts, VideoFacts

#: Sides of a video, as its rows are counted: some kernels take few rows alone, some many.
_SIDES = (8, 16)
#: Sizes that most kernels have; where a slot has none of them, its smallest is asked for.
_HEAD_DIMS = (64, 128)
_PAGE_SIZES = (16, 64, 128, 256)
_TILE = (4, 4, 4)
_BLOCK = 64


@dataclass(frozen=True)
class Heads:
    """Query heads, key and value heads, and their size; no size: the common ones."""

    queries: int = 8
    keys: int = 8
    dim: int | None = None


def plain_calls(
    features: Features, device: str, *, kinds: Collection[str], heads: Heads, dtype: str | None = None, **switches: Any
) -> Iterator[Request]:
    """Calls of these kinds, one for each dtype and common size that a slot claims; `switches` are a request's fields.

    Shapes and structures are what real calls have: tests/unit/test_plain_calls.py makes the tensors to each of them.
    """
    dtypes = sorted(features.dtypes) if dtype is None else [dtype]
    dims = _some(features.head_dims, _HEAD_DIMS) if heads.dim is None else (heads.dim,)
    for side, kind, name, dim in product(_SIDES, sorted(kinds), dtypes, dims):
        rows = side**3
        for pages in _some(features.page_sizes, _PAGE_SIZES) if kind == "paged" else (0,):
            facts = _FACTS[kind](rows, name, pages)
            batch = () if kind == "packed" else (facts.documents or 1,)
            keys = (-(-rows // pages), pages) if pages else (*batch, rows)
            q = TensorFacts.contiguous((*batch, rows, heads.queries, dim), name)
            k = TensorFacts.contiguous((*keys, heads.keys, dim), name)
            yield Request(
                q, k, k, device=device, structure_kind=kind, structure_facts=facts, scale=dim**-0.5, **switches
            )


def _plain(rows: int, dtype: str, pages: int) -> StructureFacts:
    return StructureFacts()


def _prefix_kv(rows: int, dtype: str, pages: int) -> StructureFacts:
    """What key padding is where all rows keep the same keys, as one row does."""
    return StructureFacts(
        documents=1, queries="same", prefix=True, common_prefix=rows // 2, mask_shape=(1, 1, 1, rows), mask_dtype="bool"
    )


def _key_padding(rows: int, dtype: str, pages: int) -> StructureFacts:
    return StructureFacts(documents=2, queries="same", prefix=True, mask_shape=(2, 1, 1, rows), mask_dtype="bool")


def _mask(rows: int, dtype: str, pages: int) -> StructureFacts:
    return StructureFacts(host=False, mask_shape=(1, 1, rows, rows), mask_dtype="bool")


def _bias(rows: int, dtype: str, pages: int) -> StructureFacts:
    return StructureFacts(host=False, mask_shape=(1, 1, rows, rows), mask_dtype=dtype)


def _packed(rows: int, dtype: str, pages: int) -> StructureFacts:
    return StructureFacts(documents=2)


def _spans(rows: int, dtype: str, pages: int) -> StructureFacts:
    return StructureFacts(documents=1, spans=True)


def _paged(rows: int, dtype: str, pages: int) -> StructureFacts:
    return StructureFacts(documents=1, query_layout="batched", page_size=pages)


def _video_tiles(rows: int, dtype: str, pages: int) -> StructureFacts:
    side = round(rows ** (1 / 3))
    tiles = (side // _TILE[0]) ** 3
    kept = -(-tiles // 10)
    return StructureFacts(video=VideoFacts((side, side, side), _TILE, (), rows, kept, tiles))


def _block_map(rows: int, dtype: str, pages: int) -> StructureFacts:
    return StructureFacts(blocks=(_BLOCK, _BLOCK))


_FACTS = {
    "dense": _plain,
    "prefix_kv": _prefix_kv,
    "key_padding": _key_padding,
    "mask": _mask,
    "bias": _bias,
    "packed": _packed,
    "spans": _spans,
    "paged": _paged,
    "video_tiles": _video_tiles,
    "block_map": _block_map,
}


def _some(limit: Collection[int] | None, common: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the common sizes that are within the limit, or its smallest."""
    found = tuple(size for size in common if limit is None or size in limit)
    return found or tuple(sorted(limit or ())[:1])
