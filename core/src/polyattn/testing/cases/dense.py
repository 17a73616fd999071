"""Dense cases: both ways that Sq and Sk can differ, rows that see nothing, keys that nobody sees."""

from __future__ import annotations

from functools import partial
from typing import Any

from polyattn.testing.cases.call import (
    Call,
    Case,
    captures,
    concurrent,
    edges,
    lse_gradients,
    poisoned,
    surroundings,
    unsynced,
)
from polyattn.testing.cases.maker import PLAIN, Heads, Maker, spoil
from polyattn.testing.cases.quantised import quantised, quantised_asks
from polyattn.testing.cases.variations import positions, variations


def dense(make: Maker, heads: Heads = PLAIN, *, batch: int = 2, queries: int = 7, keys: int = 7, **rule: Any) -> Call:
    """A plain call."""
    return Call(*make.qkv((batch, queries), (batch, keys), heads), **rule)


def window_hides_garbage(make: Maker, *, queries: int = 3, keys: int = 12, unseen: int = 7, **rule: Any) -> Call:
    """Queries at the end of the keys look so few keys back that the first `unseen` ones are nobody's."""
    call = dense(make, queries=queries, keys=keys, **rule)
    for row in range(2):
        spoil(call.k[row, :unseen], call.v[row, :unseen])
    return call


def poisoned_sample(make: Maker, **rule: Any) -> Call:
    """Keys and values of the second sample are NaN here and there; the samples beside it must not feel it."""
    call = dense(make, batch=3, queries=130, keys=190, **rule)
    spoil(call.k[1, 60:70], call.v[1, 60:70])
    return call


CASES = (
    *variations("dense", dense),
    *positions("dense", dense),
    *surroundings("dense", {"": dense}),
    *captures("dense", {"": dense, "_causal_gqa": partial(dense, heads=Heads(4, 2), keys=9, causal=True)}),
    *concurrent("dense", {"": partial(dense, heads=Heads(4, 4), queries=300, keys=500)}),
    *unsynced("dense", {"": dense, "_window": partial(dense, keys=9, window=(2, 0))}),
    *poisoned("dense", {"_sample": poisoned_sample}),
    *quantised(
        "dense",
        {
            "": dense,
            "_causal": partial(dense, queries=5, keys=9, causal=True),
            "_window": partial(dense, window=(2, 1)),
            "_softcap": partial(dense, softcap=1.5),
            "_scale": partial(dense, scale=0.37),
            "_gqa": partial(dense, heads=Heads(6, 2)),
            "_v_dim": partial(dense, heads=Heads(v_dim=32)),
            "_head_dim_96": partial(dense, heads=Heads(head_dim=96)),
            "_head_dim_128": partial(dense, heads=Heads(head_dim=128)),
            "_strides": partial(dense, heads=Heads(strides=("transposed", "fused", "row_gaps"))),
            "_more_queries": partial(dense, queries=9, keys=3),
            "_more_queries_causal": partial(dense, queries=9, keys=4, causal=True),
            "_across_blocks": partial(dense, batch=1, queries=300, keys=290),
            "_across_blocks_causal": partial(dense, batch=1, queries=257, keys=300, causal=True),
            "_poisoned_sample": poisoned_sample,
        },
        poisoned=frozenset({"_poisoned_sample"}),
    ),
    *quantised_asks("dense", dense),
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
            "across_blocks_window_hides_garbage": partial(
                window_hides_garbage, queries=130, keys=400, unseen=200, causal=True, window=70
            ),
        },
    ),
)
