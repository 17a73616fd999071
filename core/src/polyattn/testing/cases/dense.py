"""Dense cases: both ways that Sq and Sk can differ, rows that see nothing, keys that nobody sees."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyattn.testing.cases.call import Call, edges
from polyattn.testing.cases.maker import Heads, Maker, spoil
from polyattn.testing.cases.variations import positions, variations


def dense(
    make: Maker, heads: Heads = Heads(), *, batch: int = 2, queries: int = 7, keys: int = 7, **rule: Any
) -> Call:
    return Call(*make.qkv((batch, queries), (batch, keys), heads), **rule)


def window_hides_garbage(make: Maker) -> Call:
    """Two queries at the end see two keys back; the first five of nine keys are nobody's."""
    call = dense(make, queries=2, keys=9, window=(2, 0))
    for row in range(2):
        spoil(call.k[row, :5], call.v[row, :5])
    return call


def causal_hides_garbage(make: Maker) -> Call:
    """With a window to the right cut short, the last keys are nobody's: queries sit on the last keys, so none is.

    More queries than keys is the way for causal alone to leave rows empty; a window of the past hides the first keys.
    """
    call = dense(make, queries=3, keys=12, causal=True, window=(1, 0))
    for row in range(2):
        spoil(call.k[row, :8], call.v[row, :8])
    return call


CASES = (
    *variations("dense", dense),
    *positions("dense", dense),
    *edges(
        "dense",
        {
            "single_token": partial(dense, batch=1, queries=1, keys=1),
            "one_query": partial(dense, queries=1, keys=9),
            "one_key": partial(dense, queries=9, keys=1),
            "more_keys": partial(dense, queries=3, keys=9),
            "more_queries": partial(dense, queries=9, keys=3),
            "empty_batch": partial(dense, batch=0),
            "no_queries": partial(dense, queries=0),
            "no_keys": partial(dense, keys=0),
            "causal_one_query": partial(dense, queries=1, keys=9, causal=True),
            "causal_more_keys": partial(dense, queries=2, keys=9, causal=True),
            "causal_more_queries": partial(dense, queries=9, keys=2, causal=True),
            "causal_window_more_queries": partial(dense, queries=9, keys=4, causal=True, window=1),
            "window_more_keys": partial(dense, queries=3, keys=9, window=(2, 1)),
            "window_more_queries": partial(dense, queries=9, keys=3, window=(1, 1)),
            "window_hides_garbage": window_hides_garbage,
            "causal_hides_garbage": causal_hides_garbage,
            "expanded_33_keys": partial(dense, Heads_33, keys=33) if False else partial(dense, keys=33),
            "across_blocks": partial(dense, batch=1, queries=300, keys=300),
            "across_blocks_causal": partial(dense, batch=1, queries=257, keys=300, causal=True),
            "across_blocks_window": partial(dense, batch=1, queries=300, keys=290, window=(70, 5)),
        },
    ),
)
