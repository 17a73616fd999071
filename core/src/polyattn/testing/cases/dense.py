"""Dense cases: both ways that Sq and Sk can differ, rows that see nothing, keys that nobody sees."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyattn.testing.cases.call import Call, Case, edges, lse_gradients, surroundings
from polyattn.testing.cases.maker import PLAIN, Heads, Maker, spoil
from polyattn.testing.cases.variations import positions, variations


def dense(make: Maker, heads: Heads = PLAIN, *, batch: int = 2, queries: int = 7, keys: int = 7, **rule: Any) -> Call:
    """A plain call."""
    return Call(*make.qkv((batch, queries), (batch, keys), heads), **rule)


def window_hides_garbage(make: Maker, **rule: Any) -> Call:
    """Three queries at the end of twelve keys look two keys back: the first seven keys are nobody's."""
    call = dense(make, queries=3, keys=12, **rule)
    for row in range(2):
        spoil(call.k[row, :7], call.v[row, :7])
    return call


CASES = (
    *variations("dense", dense),
    *positions("dense", dense),
    *surroundings("dense", {"": dense}),
    *lse_gradients(
        "dense",
        {
            "gqa": partial(dense, heads=Heads(4, 2)),
            "causal_more_queries": partial(dense, queries=9, keys=2, causal=True),
            "no_keys": partial(dense, keys=0),
            "across_blocks_causal": partial(dense, batch=1, queries=257, keys=300, causal=True),
        },
    ),
    Case("dense/compiled_window", "dense", partial(dense, window=(2, 1), scale=0.37), compiled=True),
    Case("dense/compiled+lse+grad", "dense", dense, lse=True, grad=True, compiled=True),
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
            "window_hides_garbage": partial(window_hides_garbage, window=(2, 0)),
            "causal_window_hides_garbage": partial(window_hides_garbage, causal=True, window=2),
            "expanded_33_keys": partial(dense, heads=Heads(strides=("contiguous", "one_head", "one_head")), keys=33),
            "across_blocks": partial(dense, batch=1, queries=300, keys=300),
            "across_blocks_causal": partial(dense, batch=1, queries=257, keys=300, causal=True),
            "across_blocks_window": partial(dense, batch=1, queries=300, keys=290, window=(70, 5)),
        },
    ),
)
