"""Paged cases: decode, prefill, chunks; the three query layouts; tables as they come; garbage where nobody reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polyattn.structures import Paged
from polyattn.testing.cases.call import (
    Call,
    captures,
    cold_captures,
    concurrent,
    edges,
    poisoned,
    surroundings,
    unsynced,
)
from polyattn.testing.cases.maker import GARBAGE, PLAIN, Heads, Maker, written
from polyattn.testing.cases.quantised import quantised
from polyattn.testing.cases.variations import positions, variations

Spans = list[list[tuple[int, int]]]


def paged(
    make: Maker,
    heads: Heads = PLAIN,
    *,
    keys: Sequence[int] = (9, 4, 6),
    queries: int = 3,
    new: Sequence[int] | None = None,
    layout: str = "batched",
    spans: Spans | None = None,
    dtype: torch.dtype = torch.int32,
    host: bool = True,
    **rule: Any,
) -> Call:
    """Rows of `keys[b]` keys in shuffled pages. `new`: q_lengths, with q padded or packed."""
    q_rows = (sum(new or ()),) if layout == "packed" else (len(keys), queries)
    q, k, v, table = _pools(make, heads, q_rows, keys)
    lengths: Any = list(keys) if host else make.integers(list(keys))
    return Call(q, k, v, Paged(make.integers(table, dtype), lengths, new, spans), **rule)


def other_pages(make: Maker, captured: Call) -> Call:
    """Other pages and lengths, written into the tables of the structure that a graph was captured with."""
    assert isinstance(captured.structure, Paged)
    call = paged(make, keys=(4, 6, 9), queries=captured.q.shape[1], host=False, causal=captured.causal)
    assert isinstance(call.structure, Paged)
    captured.structure.block_table.copy_(call.structure.block_table)
    captured.structure.kv_lengths.copy_(call.structure.kv_lengths)
    return replace(call, structure=captured.structure)


def poisoned_row(make: Maker, **given: Any) -> Call:
    """Keys and values that the second row reads are NaN; the rows beside it must not feel it."""
    call = paged(make, **given)
    assert isinstance(call.structure, Paged)
    page = int(call.structure.block_table[1, 0])
    for pool in (call.k, call.v):
        pool[page, :2] = float("nan")
    return call


def window_hides_garbage(make: Maker, **rule: Any) -> Call:
    """Keys before every query's window hold garbage, in pages that the row's other keys lie in."""
    call = paged(make, keys=(9, 7, 8), queries=2, window=(2, 0), **rule)
    assert isinstance(call.structure, Paged)
    for row, unseen in enumerate((5, 3, 4)):
        for place in range(unseen):
            page = int(call.structure.block_table[row, place // make.page_size])
            for pool in (call.k, call.v):
                written(pool)[page, place % make.page_size] = GARBAGE[place % len(GARBAGE)]
    return call


def shared_prefix(make: Maker, **rule: Any) -> Call:
    """Two rows share their first page."""
    q, k, v, table = _pools(make, PLAIN, (2, 2), (2 * make.page_size, make.page_size + 1))
    table[1][0] = table[0][0]
    structure = Paged(table, [2 * make.page_size, make.page_size + 1])
    return Call(q, k, v, structure, **rule)


def fused_pool(make: Maker, **rule: Any) -> Call:
    """K and V are halves of one pool [pages,2,page_size,H,D]."""
    call = paged(make, **rule)
    pool = torch.stack((call.k, call.v), dim=1)
    return Call(call.q, pool[:, 0], pool[:, 1], call.structure, **rule)


def _pools(
    make: Maker, heads: Heads, q_rows: tuple[int, ...], keys: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[list[int]]]:
    """q, pools with garbage in every slot that no row owns, and a table of shuffled pages padded with -1."""
    size = make.page_size
    needed = [-(-count // size) for count in keys]
    spare = 2
    q, k, v = make.qkv(q_rows, (sum(needed) + spare, size), heads)
    free = list(range(sum(needed) + spare))[::-2] + list(range(sum(needed) + spare))[-2::-2]
    table, owned = [], set()
    for count, pages in zip(keys, needed, strict=True):
        mine, free = free[:pages], free[pages:]
        owned |= {(mine[slot // size], slot % size) for slot in range(count)}
        table.append(mine + [-1] * (max(needed, default=0) + 1 - pages))
    for page in range(k.shape[0]):
        for offset in range(size):
            if (page, offset) not in owned:
                for pool in (k, v):
                    written(pool)[page, offset] = GARBAGE[(page + offset) % len(GARBAGE)]
    return q, k, v, table


_PADDED: dict[str, Any] = {"queries": 4, "new": (2, 4, 1)}
_PACKED: dict[str, Any] = {"new": (2, 4, 1), "layout": "packed"}

CASES = (
    *variations("paged", paged),
    *positions("paged", paged),
    *surroundings("paged", {"": paged}),
    *captures(
        "paged",
        {
            "": paged,
            "_on_device": partial(paged, host=False),
            "_on_device_causal": partial(paged, host=False, causal=True),
            "_decode_on_device": partial(paged, queries=1, host=False),
        },
        dict.fromkeys(("_on_device", "_on_device_causal", "_decode_on_device"), other_pages),
    ),
    *cold_captures("paged", {"": paged}),
    *concurrent("paged", {"": partial(paged, heads=Heads(4, 4), keys=(300, 129, 500), queries=150)}),
    *unsynced(
        "paged",
        {"": paged, "_on_device": partial(paged, host=False), "_packed": partial(paged, **_PACKED)},
    ),
    *poisoned("paged", {"_row": poisoned_row, "_row_on_device": partial(poisoned_row, host=False)}),
    *quantised("paged", {"": paged}),
    *edges(
        "paged",
        {
            "decode": partial(paged, queries=1),
            "decode_causal": partial(paged, queries=1, causal=True),
            "decode_gqa": partial(paged, heads=Heads(4, 1), queries=1),
            "one_row": partial(paged, keys=(5,)),
            "one_key": partial(paged, keys=(1, 1), queries=1),
            "row_without_keys": partial(paged, keys=(6, 0, 4)),
            "no_keys": partial(paged, keys=(0, 0)),
            "more_queries_than_keys": partial(paged, keys=(2, 5), queries=5, causal=True),
            "prefill_causal": partial(paged, keys=(6, 6), queries=6, causal=True),
            "many_pages": partial(paged, keys=(33, 17, 40), queries=2),
            "table_int64": partial(paged, dtype=torch.int64),
            "lengths_on_device": partial(paged, host=False),
            "padded": partial(paged, **_PADDED),
            "padded_causal": partial(paged, **_PADDED, causal=True),
            "padded_none_new": partial(paged, queries=4, new=(2, 0, 1), causal=True),
            "packed": partial(paged, **_PACKED),
            "packed_causal": partial(paged, **_PACKED, causal=True),
            "packed_window": partial(paged, **_PACKED, window=(2, 0)),
            "window_hides_garbage": window_hides_garbage,
            "causal_window_hides_garbage": partial(window_hides_garbage, causal=True),
            "packed_gqa": partial(paged, heads=Heads(4, 2), **_PACKED),
            "packed_none_new": partial(paged, new=(2, 0, 1), layout="packed", causal=True),
            "shared_prefix": shared_prefix,
            "fused_pool": fused_pool,
            "fused_pool_causal": partial(fused_pool, causal=True),
            "spans": partial(paged, queries=4, spans=[[(5, 8)], [(0, 4)], []]),
            "spans_padded": partial(paged, **_PADDED, spans=[[(6, 9)], [(1, 3)], []]),
            "spans_packed": partial(paged, **_PACKED, spans=[[(6, 9)], [(1, 3)], []]),
            "spans_none": partial(paged, queries=4, spans=[[], [], []]),
            "across_blocks": partial(paged, keys=(300, 129), queries=140, causal=True),
        },
    ),
)
