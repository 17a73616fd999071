"""Packed cases: documents of all lengths, none included; boundaries as they come; rows past the last one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from polyattn.structures import Packed
from polyattn.testing.cases.call import (
    Call,
    captures,
    cold_captures,
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

LENGTHS = (3, 1, 5)


def packed(
    make: Maker,
    heads: Heads = PLAIN,
    *,
    q: Sequence[int] = LENGTHS,
    k: Sequence[int] | None = None,
    spare: int = 0,
    **rule: Any,
) -> Call:
    """Documents of these lengths, known on the host, and `spare` rows of garbage after the last."""
    keys = q if k is None else k
    tensors = make.qkv((sum(q) + spare,), (sum(keys) + spare,), heads)
    spoil(*(tensor[sum(keys) :] for tensor in tensors[1:]))
    return Call(*tensors, Packed.from_lengths(list(q), None if k is None else list(k)), **rule)


def leading_one(make: Maker, heads: Heads = PLAIN, **rule: Any) -> Call:
    """[1,T,H,D], as models that pack pass it."""
    return Call(*make.qkv((1, 9), (1, 9), heads), Packed.from_lengths(LENGTHS), **rule)


def boundaries(make: Maker, dtype: torch.dtype, *, cross: bool = False, **rule: Any) -> Call:
    """Cumulative boundaries as tensors on the device."""
    cu_q = make.integers([0, 3, 4, 9], dtype)
    cu_k = make.integers([0, 2, 8, 9], dtype) if cross else None
    structure = Packed.from_cu_seqlens(cu_q, cu_k, max_q=5, max_k=6 if cross else None)
    return Call(*make.qkv((9,), (9,)), structure, **rule)


def real_and_pad(make: Maker, heads: Heads = PLAIN, *, real: int = 5, k_real: int | None = None, **rule: Any) -> Call:
    """One document in tensors of nine rows (of twelve keys where the keys are told apart), garbage after it."""
    k_total = 9 if k_real is None else 12
    structure = Packed.real_and_pad(real, 9, k_real, None if k_real is None else k_total)
    call = Call(*make.qkv((9,), (k_total,), heads), structure, **rule)
    spoil(*(tensor[real if k_real is None else k_real :] for tensor in (call.k, call.v)))
    return call


def position_ids(make: Maker, **rule: Any) -> Call:
    """Documents told by their positions starting anew."""
    return Call(*make.qkv((6,), (6,)), Packed.from_position_ids([0, 1, 0, 0, 1, 2]), **rule)


def capacity(make: Maker, *, updated: bool = False, **rule: Any) -> Call:
    """Room for four documents of up to six rows, as a graph replays it."""
    structure = Packed.from_lengths([3, 1, 5], capacity=(4, 6))
    if updated:
        structure.update_([2, 6])
    call = Call(*make.qkv((12,), (12,)), structure, **rule)
    spoil(*(tensor[9 if not updated else 8 :] for tensor in (call.k, call.v)))
    return call


def other_lengths(make: Maker, captured: Call) -> Call:
    """Other lengths within the capacity, written into the structure that a graph was captured with."""
    assert isinstance(captured.structure, Packed)
    captured.structure.update_([2, 6, 0, 3])
    call = Call(*make.qkv((12,), (12,)), captured.structure, causal=captured.causal)
    spoil(call.k[11:], call.v[11:])
    return call


def loud_rows(make: Maker, **rule: Any) -> Call:
    """Keys and values past the last document are finite, and so large that a scale taken from them leaves nothing."""
    call = real_and_pad(make, **rule)
    for tensor in (call.k, call.v):
        tensor[5:] = 2.0**14
    return call


def poisoned_document(make: Maker, build: Any, first: int, **given: Any) -> Call:
    """Keys and values of one document are NaN from row `first` on for three rows; its neighbours must not feel it."""
    call: Call = build(make, **given)
    spoil(call.k[first : first + 3], call.v[first : first + 3])
    return call


def with_spans(make: Maker, spans: list[list[tuple[int, int]]], *, k: Sequence[int] | None = None) -> Call:
    """Documents with full spans of their own."""
    structure = Packed.from_lengths(LENGTHS, k, spans=spans)
    return Call(*make.qkv((9,), (sum(k or LENGTHS),)), structure)


_CROSS: dict[str, Any] = {"q": (2, 4, 1), "k": (5, 2, 3)}

CASES = (
    *variations("packed", packed),
    *positions("packed", packed),
    *surroundings("packed", {"": packed}),
    *captures(
        "packed",
        {
            "": packed,
            "_spare_rows": partial(packed, spare=4),
            "_on_device": partial(boundaries, dtype=torch.int32),
            "_capacity": capacity,
            "_capacity_causal": partial(capacity, causal=True),
        },
        {"_capacity": other_lengths, "_capacity_causal": other_lengths},
    ),
    *cold_captures("packed", {"": packed, "_capacity": capacity}),
    *concurrent("packed", {"": partial(packed, heads=Heads(4, 4), q=(200, 3, 300))}),
    *unsynced(
        "packed",
        {
            "": packed,
            "_spare_rows": partial(packed, spare=4),
            "_on_device": partial(boundaries, dtype=torch.int64),
            "_capacity": capacity,
        },
    ),
    *poisoned(
        "packed",
        {
            "_first_document": partial(poisoned_document, build=packed, first=0, q=(3, 1, 5)),
            "_document": partial(poisoned_document, build=packed, first=150, q=(130, 60, 140)),
            "_document_causal": partial(poisoned_document, build=packed, first=150, q=(130, 60, 140), causal=True),
            "_document_across_blocks": partial(poisoned_document, build=packed, first=390, q=(200, 300, 70)),
            "_document_on_device": partial(poisoned_document, build=boundaries, first=5, dtype=torch.int32),
        },
    ),
    *quantised(
        "packed",
        {
            "": packed,
            "_causal": partial(packed, causal=True),
            "_cross": partial(packed, **_CROSS),
            "_gqa": partial(packed, heads=Heads(4, 2)),
            "_document_without_keys": partial(packed, q=(3, 2, 2), k=(2, 0, 3)),
            "_spare_rows": partial(packed, spare=4),
            "_on_device": partial(boundaries, dtype=torch.int32),
            "_capacity": capacity,
            "_loud_rows": loud_rows,
            "_across_blocks": partial(packed, q=(150, 3, 140)),
            "_poisoned_document": partial(poisoned_document, build=packed, first=30, q=(20, 30, 9)),
        },
        poisoned=frozenset({"_poisoned_document"}),
    ),
    *quantised_asks("packed", packed),
    *lse_gradients(
        "packed",
        {
            "document_without_keys": partial(packed, q=(3, 2, 2), k=(2, 0, 3)),
            "real_and_pad": real_and_pad,
        },
    ),
    *edges(
        "packed",
        {
            "one_document": partial(packed, q=(7,)),
            "one_token_each": partial(packed, q=(1, 1, 1)),
            "equal_lengths": partial(packed, q=(4, 4, 4)),
            "equal_lengths_causal": partial(packed, q=(4, 4, 4), causal=True),
            "equal_lengths_cross": partial(packed, q=(3, 3), k=(5, 5)),
            "many_documents": partial(packed, q=tuple(1 + i % 4 for i in range(33))),
            "many_equal_documents": partial(packed, q=(2,) * 33),
            "empty_document_first": partial(packed, q=(0, 3, 2)),
            "empty_document_last": partial(packed, q=(3, 2, 0)),
            "empty_documents_between": partial(packed, q=(3, 0, 0, 2)),
            "no_document": partial(packed, q=()),
            "only_empty_documents": partial(packed, q=(0, 0)),
            "only_empty_documents_and_spare_rows": partial(packed, q=(0, 0), spare=3),
            "cross": partial(packed, **_CROSS),
            "cross_causal": partial(packed, **_CROSS, causal=True),
            "cross_window": partial(packed, **_CROSS, window=(1, 1)),
            "document_without_queries": partial(packed, q=(3, 0, 2), k=(2, 4, 3)),
            "document_without_keys": partial(packed, q=(3, 2, 2), k=(2, 0, 3)),
            "document_without_keys_causal": partial(packed, q=(3, 2, 2), k=(2, 0, 3), causal=True),
            "no_keys": partial(packed, q=(3, 2), k=(0, 0)),
            "spare_rows": partial(packed, spare=4),
            "spare_rows_causal": partial(packed, spare=4, causal=True),
            "spare_rows_cross": partial(packed, **_CROSS, spare=4),
            "spare_rows_gqa": partial(packed, heads=Heads(4, 2), spare=4),
            "spare_rows_equal_lengths": partial(packed, q=(4, 4), spare=3),
            "leading_one": leading_one,
            "leading_one_causal_gqa": partial(leading_one, heads=Heads(4, 2), causal=True),
            "leading_one_fused": partial(leading_one, heads=Heads(strides=("fused",) * 3)),
            "boundaries_int32": partial(boundaries, dtype=torch.int32),
            "boundaries_int64": partial(boundaries, dtype=torch.int64),
            "boundaries_cross_causal": partial(boundaries, dtype=torch.int64, cross=True, causal=True),
            "real_and_pad": real_and_pad,
            "real_and_pad_causal": partial(real_and_pad, causal=True),
            "real_and_pad_window": partial(real_and_pad, window=(1, 1)),
            "real_and_pad_gqa": partial(real_and_pad, heads=Heads(4, 2)),
            "real_and_no_pad": partial(real_and_pad, real=9),
            "only_pad": partial(real_and_pad, real=0),
            "real_and_pad_cross": partial(real_and_pad, k_real=7),
            "real_and_pad_cross_causal": partial(real_and_pad, k_real=7, causal=True),
            "position_ids": position_ids,
            "capacity": capacity,
            "capacity_updated": partial(capacity, updated=True),
            "capacity_updated_causal": partial(capacity, updated=True, causal=True),
            "spans": partial(with_spans, spans=[[(0, 2)], [], [(1, 3), (4, 5)]]),
            "spans_cross": partial(with_spans, spans=[[(1, 4)], [(0, 1)], []], k=(4, 2, 6)),
            "spans_none": partial(with_spans, spans=[[], [], []]),
            "across_blocks": partial(packed, q=(150, 3, 140)),
            "across_blocks_causal": partial(packed, q=(150, 3, 140), causal=True),
            "across_blocks_cross_causal": partial(packed, q=(33, 130, 1), k=(140, 65, 90), causal=True),
            "across_blocks_spare_rows": partial(packed, q=(200, 90), spare=110),
            "across_blocks_spare_rows_causal": partial(packed, q=(200, 90), spare=110, causal=True),
        },
    ),
)
