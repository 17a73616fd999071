"""Spans cases: the worked examples, spans at every place, samples that differ, queries that sit anywhere."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyattn.structures import Spans
from polyattn.testing.cases.call import Call, captures, cold_captures, edges, surroundings, unsynced
from polyattn.testing.cases.maker import PLAIN, Heads, Maker
from polyattn.testing.cases.quantised import quantised
from polyattn.testing.cases.variations import variations

Full = list[list[tuple[int, int]]]
Ranges = list[tuple[int, int, int]]


def spans(
    make: Maker,
    heads: Heads = PLAIN,
    *,
    full: Full | None = None,
    ranges: Ranges | None = None,
    queries: int = 8,
    keys: int = 8,
    **rule: Any,
) -> Call:
    """One sample a list of full spans."""
    full = [[(2, 5)], [(0, 3), (6, 8)]] if full is None else full
    tensors = make.qkv((len(full), queries), (len(full), keys), heads)
    return Call(*tensors, Spans(full, ranges), **rule)


CASES = (
    *variations("spans", spans),
    *surroundings("spans", {"": spans}),
    *captures("spans", {"": spans}),
    *cold_captures("spans", {"": spans}),
    *unsynced("spans", {"": spans, "_last_queries": partial(spans, full=[[(1, 6)], [(3, 8)]], queries=4)}),
    *quantised("spans", {"": spans, "_same_for_all": partial(spans, full=[[(2, 5)], [(2, 5)]])}),
    *edges(
        "spans",
        {
            "example_a": partial(spans, full=[[(2, 5)]]),
            "example_b": partial(spans, full=[[(4, 7)]], queries=3),
            "example_c": partial(spans, full=[[(2, 7)]], ranges=[(0, 1, 0), (1, 4, 4)], queries=4),
            "none": partial(spans, full=[[], []]),
            "everything": partial(spans, full=[[(0, 8)], [(0, 8)]]),
            "one_key_each": partial(spans, full=[[(0, 1), (3, 4), (7, 8)]]),
            "adjacent": partial(spans, full=[[(1, 3), (3, 6)]]),
            "same_for_all": partial(spans, full=[[(2, 5)], [(2, 5)], [(2, 5)]]),
            "some_without": partial(spans, full=[[(2, 5)], [], [(0, 8)]]),
            "one_query": partial(spans, full=[[(2, 8)], [(0, 3)]], queries=1),
            "last_queries": partial(spans, full=[[(1, 6)], [(3, 8)]], queries=4),
            "more_queries": partial(spans, full=[[(0, 2)], [(1, 4)]], queries=7, keys=4),
            "ranges_whole": partial(spans, full=[[(2, 5)]], ranges=[(0, 8, 0)]),
            "ranges_end_inside_a_span": partial(spans, full=[[(1, 6)], [(3, 7)]], ranges=[(0, 4, 0)], queries=4),
            "ranges_out_of_order": partial(spans, full=[[(2, 5)]], ranges=[(0, 3, 5), (3, 6, 0)], queries=6),
            "ranges_gap": partial(spans, full=[[(2, 5)], []], ranges=[(0, 2, 1), (2, 5, 5)], queries=5),
            "gqa_last_queries": partial(spans, heads=Heads(4, 2), full=[[(1, 6)], [(3, 8)]], queries=4),
            "single_token": partial(spans, full=[[(0, 1)]], queries=1, keys=1),
            "no_queries": partial(spans, full=[[(0, 1)]], queries=0, keys=4),
            "across_blocks": partial(spans, full=[[(20, 150), (200, 290)], [(0, 129)]], queries=300, keys=300),
            "across_blocks_last_queries": partial(spans, full=[[(20, 150), (200, 290)]], queries=140, keys=300),
        },
    ),
)
