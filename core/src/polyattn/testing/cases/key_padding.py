"""KeyPadding cases: prefixes, left padding, holes; rows of nothing; garbage in the padding; the two query rules."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from polyattn.structures import KeyPadding
from polyattn.testing.cases.call import (
    Call,
    captures,
    cold_captures,
    concurrent,
    edges,
    forward_edges,
    lse_gradients,
    poisoned,
    surroundings,
    unsynced,
)
from polyattn.testing.cases.maker import PLAIN, Heads, Maker, spoil
from polyattn.testing.cases.quantised import quantised, quantised_asks
from polyattn.testing.cases.variations import positions, variations


def padded(
    make: Maker,
    heads: Heads = PLAIN,
    *,
    lengths: tuple[int, ...] = (7, 4),
    keys: int = 7,
    queries: int | None = None,
    **rule: Any,
) -> Call:
    """Row b keeps its first keys; `queries` given: cross attention from that many."""
    rows = len(lengths)
    structure = KeyPadding.from_lengths(lengths, keys, queries=None if queries is None else "all")
    tensors = make.qkv((rows, keys if queries is None else queries), (rows, keys), heads)
    return Call(*tensors, structure, **rule)


def ranges(
    make: Maker, kept: list[list[tuple[int, int]]], *, keys: int = 7, queries: int | None = None, **rule: Any
) -> Call:
    """Row b keeps these half-open ranges of its keys."""
    structure = KeyPadding.from_ranges(kept, keys, queries=None if queries is None else "all")
    return Call(*make.qkv((len(kept), queries or keys), (len(kept), keys)), structure, **rule)


def from_mask(make: Maker, dtype: torch.dtype, **rule: Any) -> Call:
    """A mask of ones and zeros on the device, which nobody reads on the host."""
    mask = make.integers([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0, 1]], dtype)
    return Call(*make.qkv((2, 7), (2, 7)), KeyPadding.from_mask(mask), **rule)


def lengths_on_device(make: Maker, *, lengths: tuple[int, ...] = (7, 3), keys: int = 7, **rule: Any) -> Call:
    """Lengths that only the device knows."""
    structure = KeyPadding.from_lengths(make.integers(lengths), keys)
    rows = (len(lengths), keys)
    return Call(*make.qkv(rows, rows), structure, **rule)


def garbage_in_padding(make: Maker, build: Any, **given: Any) -> Call:
    """Padded keys and values hold NaN and infinities, as uninitialised rows do."""
    call: Call = build(make, **given)
    assert isinstance(call.structure, KeyPadding)
    for row, keep in enumerate(call.structure.keep.tolist()):
        hidden = [index for index, kept in enumerate(keep) if not kept]
        for tensor in (call.k, call.v):
            garbage = tensor[row, hidden]
            spoil(garbage)
            tensor[row, hidden] = garbage
    return call


def garbage_in_padded_tokens(make: Maker, **given: Any) -> Call:
    """The padded query rows, which are the same tokens, hold it too."""
    call = garbage_in_padding(make, padded, **given)
    call.q[1, 4:] = float("nan")
    return call


def loud_padding(make: Maker, **given: Any) -> Call:
    """Padded keys and values are finite, and so large that a scale taken from them would leave nothing of the rest."""
    call = padded(make, **given)
    assert isinstance(call.structure, KeyPadding)
    hidden = ~call.structure.keep.to(call.k.device)[..., None, None]
    for tensor in (call.k, call.v):
        tensor.masked_fill_(hidden, 2.0**14)
    return call


def poisoned_sample(make: Maker, build: Any, **given: Any) -> Call:
    """Kept keys and values of the second sample are NaN here and there; its neighbours must not feel it."""
    call: Call = build(make, **given)
    spoil(call.k[1, 3:9], call.v[1, 3:9])
    return call


_LEFT = [[(3, 7)], [(0, 7)]]
_HOLES = [[(0, 2), (4, 6)], [(1, 7)]]
_NOTHING = [[], [(2, 5)]]
#: Kept rows that end within a kernel's tile, one tile or more down.
_TILES: dict[str, Any] = {"lengths": (200, 300), "keys": 400}
_TILES_HOLES: dict[str, Any] = {"kept": [[(0, 70), (190, 300)], [(5, 129), (130, 391)]], "keys": 400}

CASES = (
    *variations("key_padding", padded),
    *positions("key_padding", padded),
    *surroundings("key_padding", {"": padded, "_one_length": partial(padded, lengths=(5, 5))}),
    *captures("key_padding", {"": padded, "_holes": partial(ranges, kept=_HOLES), "_on_device": lengths_on_device}),
    *cold_captures("key_padding", {"": padded, "_on_device": lengths_on_device}),
    *concurrent("key_padding", {"": partial(padded, heads=Heads(4, 4), **_TILES)}),
    *unsynced(
        "key_padding",
        {
            "": padded,
            "_holes": partial(ranges, kept=_HOLES),
            "_on_device": lengths_on_device,
            "_cross": partial(padded, queries=4),
        },
    ),
    *poisoned(
        "key_padding",
        {
            "_sample": partial(poisoned_sample, build=padded, lengths=(150, 200, 129), keys=260),
            "_sample_of_unknown_length": partial(
                poisoned_sample, build=lengths_on_device, lengths=(150, 200, 129), keys=260
            ),
            "_sample_with_holes": partial(
                poisoned_sample, build=ranges, kept=[[(3, 150)], [(0, 70), (80, 200)], [(0, 129)]], keys=260
            ),
            "_sample_cross": partial(poisoned_sample, build=padded, lengths=(150, 200, 129), keys=260, queries=70),
        },
    ),
    *quantised(
        "key_padding",
        {
            "": padded,
            "_causal": partial(padded, causal=True),
            "_gqa": partial(padded, heads=Heads(4, 2)),
            "_row_of_padding": partial(padded, lengths=(7, 0)),
            "_holes": partial(ranges, kept=_HOLES),
            "_on_device": lengths_on_device,
            "_one_length": partial(padded, lengths=(5, 5)),
            "_cross": partial(padded, queries=4),
            "_garbage": partial(garbage_in_padding, build=padded),
            "_garbage_on_device": partial(garbage_in_padding, build=lengths_on_device),
            "_loud_padding": loud_padding,
            "_across_blocks_loud_padding": partial(loud_padding, **_TILES),
            "_poisoned_sample": partial(poisoned_sample, build=padded, lengths=(20, 30, 9), keys=40),
        },
        poisoned=frozenset({"_poisoned_sample"}),
    ),
    *quantised_asks("key_padding", padded),
    *lse_gradients(
        "key_padding",
        {"row_of_padding": partial(padded, lengths=(7, 0)), "one_length": partial(padded, lengths=(5, 5))},
    ),
    *edges(
        "key_padding",
        {
            "all_kept": partial(padded, lengths=(7, 7)),
            "one_length": partial(padded, lengths=(5, 5)),
            "one_length_causal": partial(padded, lengths=(5, 5), causal=True),
            "one_length_window": partial(padded, lengths=(5, 5), window=(1, 1)),
            "one_row": partial(padded, lengths=(3,)),
            "one_token": partial(padded, lengths=(1, 7)),
            "row_of_padding": partial(padded, lengths=(7, 0)),
            "only_padding": partial(padded, lengths=(0, 0)),
            "only_padding_causal": partial(padded, lengths=(0, 0), causal=True),
            "left": partial(ranges, kept=_LEFT),
            "left_causal": partial(ranges, kept=_LEFT, causal=True),
            "left_window": partial(ranges, kept=_LEFT, window=(1, 1)),
            "holes": partial(ranges, kept=_HOLES),
            "holes_causal": partial(ranges, kept=_HOLES, causal=True),
            "holes_window": partial(ranges, kept=_HOLES, window=(2, 0)),
            "nothing_kept": partial(ranges, kept=_NOTHING),
            "bool_mask": partial(from_mask, dtype=torch.bool),
            "bool_mask_causal": partial(from_mask, dtype=torch.bool, causal=True),
            "integer_mask": partial(from_mask, dtype=torch.int64),
            "lengths_on_device": lengths_on_device,
            "cross": partial(padded, queries=4),
            "cross_more_queries": partial(padded, queries=11),
            "cross_equal_sizes": partial(padded, queries=7),
            "cross_row_of_padding": partial(padded, lengths=(7, 0), queries=4),
            "cross_one_length": partial(padded, lengths=(5, 5), queries=4),
            "cross_one_length_causal": partial(padded, lengths=(5, 5), queries=4, causal=True),
            "cross_one_length_window": partial(padded, lengths=(5, 5), queries=9, window=(2, 1)),
            "cross_causal": partial(padded, queries=4, causal=True),
            "cross_causal_more_queries": partial(padded, queries=11, causal=True),
            "cross_window": partial(padded, queries=4, window=(2, 1)),
            "cross_left": partial(ranges, kept=_LEFT, queries=3),
            "cross_holes_causal": partial(ranges, kept=_HOLES, queries=5, causal=True),
            "garbage": partial(garbage_in_padding, build=padded),
            "garbage_one_length": partial(garbage_in_padding, build=padded, lengths=(5, 5)),
            "garbage_one_length_causal": partial(garbage_in_padding, build=padded, lengths=(5, 5), causal=True),
            "garbage_row_of_padding": partial(garbage_in_padding, build=padded, lengths=(7, 0)),
            "garbage_holes_causal": partial(garbage_in_padding, build=ranges, kept=_HOLES, causal=True),
            "garbage_left_window": partial(garbage_in_padding, build=ranges, kept=_LEFT, window=(2, 2)),
            "garbage_cross": partial(garbage_in_padding, build=padded, queries=4),
            "garbage_gqa": partial(garbage_in_padding, build=padded, heads=Heads(4, 2)),
            "garbage_on_device": partial(garbage_in_padding, build=lengths_on_device),
            "garbage_across_blocks": partial(garbage_in_padding, build=padded, **_TILES),
            "garbage_across_blocks_causal": partial(garbage_in_padding, build=padded, **_TILES, causal=True),
            "garbage_across_blocks_cross": partial(garbage_in_padding, build=padded, **_TILES, queries=150),
            "garbage_across_blocks_holes": partial(garbage_in_padding, build=ranges, **_TILES_HOLES),
            "garbage_across_blocks_on_device": partial(garbage_in_padding, build=lengths_on_device, **_TILES),
            "across_blocks": partial(padded, lengths=(300, 129), keys=300),
            "across_blocks_cross_causal": partial(padded, lengths=(300, 129), keys=300, queries=170, causal=True),
        },
    ),
    *forward_edges("key_padding", {"garbage_in_padded_tokens": garbage_in_padded_tokens}),
)
