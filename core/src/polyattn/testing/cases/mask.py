"""Mask cases: every rank and broadcast, bool, integer and additive, all the ways that a key or a row is hidden."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from polyattn.structures import Mask
from polyattn.testing.cases.call import (
    Call,
    Case,
    captures,
    cold_captures,
    edges,
    lse_gradients,
    surroundings,
    unsynced,
)
from polyattn.testing.cases.maker import PLAIN, Heads, Maker, contiguous_buffer, spoil
from polyattn.testing.cases.quantised import quantised
from polyattn.testing.cases.variations import positions, variations

Shape = tuple[int, ...]
QUERIES, KEYS = 5, 7


def masked(
    make: Maker, heads: Heads = PLAIN, *, shape: Shape = (2, 1, QUERIES, KEYS), queries: int = QUERIES, **rule: Any
) -> Call:
    """A random bool mask of this shape, each row seeing its first key at least."""
    mask = make.chance(shape)
    mask[..., 0] = True
    return Call(*make.qkv((2, queries), (2, shape[-1]), heads), Mask(mask), **rule)


def biased(
    make: Maker,
    heads: Heads = PLAIN,
    *,
    shape: Shape = (2, 1, QUERIES, KEYS),
    queries: int = QUERIES,
    dtype: torch.dtype | None = None,
    wants_grad: bool = False,
    **rule: Any,
) -> Call:
    """A random additive mask of this shape, in q's dtype unless another is given."""
    bias = make.normal(shape).to(dtype or make.dtype).requires_grad_(wants_grad)
    return Call(*make.qkv((2, queries), (2, shape[-1]), heads), Mask(bias), **rule)


def hiding(make: Maker, entry: Callable[[torch.dtype], float], dtype: torch.dtype | None = None, **rule: Any) -> Call:
    """An additive mask that hides about a third of the pairs, and row 2 of sample 1 wholly, by this entry."""
    dtype = dtype or make.dtype
    hidden = ~make.chance((2, 1, QUERIES, KEYS))
    hidden[..., 0] = False
    hidden[1, :, 2] = True
    bias = make.normal((2, 1, QUERIES, KEYS)).to(dtype).masked_fill(hidden, entry(dtype))
    return Call(*make.qkv((2, QUERIES), (2, KEYS)), Mask(bias), **rule)


def rows_of_nothing(make: Maker, heads: Heads = PLAIN, **rule: Any) -> Call:
    """Two rows see no key at all."""
    mask = make.chance((2, 1, QUERIES, KEYS))
    mask[0, :, 1] = False
    mask[1, :, 4] = False
    return Call(*make.qkv((2, QUERIES), (2, KEYS), heads), Mask(mask), **rule)


def hidden_from_all(make: Maker, rank: int, *, additive: bool = False, **rule: Any) -> Call:
    """Keys 1 and 4 are hidden from every query and hold garbage."""
    keep = torch.ones(KEYS, dtype=torch.bool, device=make.device)
    keep[[1, 4]] = False
    shape = {1: (KEYS,), 2: (2, KEYS), 3: (2, QUERIES, KEYS), 4: (2, 2, QUERIES, KEYS)}[rank]
    mask = keep.expand(shape).clone()
    if rank > 2:
        mask[:, ..., 2, 0] = False
    if additive:
        mask = torch.zeros(shape, dtype=make.dtype, device=make.device).masked_fill(~mask, float("-inf"))
    call = Call(*make.qkv((2, QUERIES), (2, KEYS)), Mask(mask), **rule)
    for row in range(2):
        for tensor in (call.k, call.v):
            garbage = tensor[row, [1, 4]]
            spoil(garbage)
            tensor[row, [1, 4]] = garbage
    return call


def only_keys(make: Maker, rank: int, **rule: Any) -> Call:
    """Rank 1 hides keys from all samples, rank 2 from each its own."""
    keep = make.integers([[1, 0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 0, 0, 1]], torch.bool)
    return Call(*make.qkv((2, QUERIES), (2, KEYS)), Mask.keys(keep if rank == 2 else keep[0]), **rule)


def pairs(make: Maker, **rule: Any) -> Call:
    """[Sq,Sk] for all samples and heads, as a transposed view."""
    keep = make.chance((KEYS, QUERIES))
    keep[0] = True
    return Call(*make.qkv((2, QUERIES), (2, KEYS)), Mask.pairs(keep.t()), **rule)


def integers(make: Maker, **rule: Any) -> Call:
    """Nonzero may attend, also -1 and 7."""
    row = make.integers([-1, 0, 1, 7, 0, 1, 2], torch.int64)
    return Call(*make.qkv((2, QUERIES), (2, KEYS)), Mask(row), **rule)


def lowest(dtype: torch.dtype) -> float:
    """What models write that add masks up, and so avoid -inf."""
    return torch.finfo(dtype).min


def minus_infinity(dtype: torch.dtype) -> float:
    """What hides a key beyond doubt."""
    return float("-inf")


_SHAPES: dict[str, Shape] = {
    "rank3": (2, QUERIES, KEYS),
    "rank3_one_sample": (1, QUERIES, KEYS),
    "rank3_one_row": (2, 1, KEYS),
    "rank4_all": (1, 1, QUERIES, KEYS),
    "rank4_per_head": (1, 2, QUERIES, KEYS),
    "rank4_full": (2, 2, QUERIES, KEYS),
    "rank4_keys": (2, 1, 1, KEYS),
    "rank4_keys_per_head": (1, 2, 1, KEYS),
}

CASES = (
    *variations("mask", masked),
    *positions("mask", masked),
    *surroundings("mask", {"": masked, "_bias": biased}),
    *captures("mask", {"": masked, "_bias": biased}),
    *cold_captures("mask", {"": masked}),
    *unsynced("mask", {"": masked, "_bias": biased, "_keys": partial(only_keys, rank=2)}),
    *quantised("mask", {"": masked, "_bias": biased}),
    *lse_gradients(
        "mask",
        {
            "rows_of_nothing": rows_of_nothing,
            "bias_minus_infinity": partial(hiding, entry=minus_infinity),
            "bias_wants_gradient": partial(biased, wants_grad=True),
        },
    ),
    *edges("mask", {name: partial(masked, shape=shape) for name, shape in _SHAPES.items()}),
    *edges("mask", {f"bias_{name}": partial(biased, shape=shape) for name, shape in _SHAPES.items()}),
    *edges(
        "mask",
        {
            "rank1": partial(only_keys, rank=1),
            "rank2": partial(only_keys, rank=2),
            "rank2_causal": partial(only_keys, rank=2, causal=True),
            "pairs": pairs,
            "integers": integers,
            "per_head_gqa": partial(masked, heads=Heads(4, 2), shape=(1, 4, QUERIES, KEYS)),
            "rows_of_nothing": rows_of_nothing,
            "rows_of_nothing_gqa": partial(rows_of_nothing, heads=Heads(4, 2)),
            "rows_of_nothing_causal": partial(rows_of_nothing, causal=True),
            "garbage_rank1": partial(hidden_from_all, rank=1),
            "garbage_rank2": partial(hidden_from_all, rank=2),
            "garbage_rank2_causal": partial(hidden_from_all, rank=2, causal=True),
            "garbage_rank3": partial(hidden_from_all, rank=3),
            "garbage_rank4": partial(hidden_from_all, rank=4),
            "garbage_bias": partial(hidden_from_all, rank=2, additive=True),
            "garbage_bias_rank4": partial(hidden_from_all, rank=4, additive=True),
            "bias_causal": partial(biased, causal=True),
            "bias_window": partial(biased, window=(1, 1)),
            "bias_softcap": partial(biased, softcap=1.5),
            "bias_scale": partial(biased, scale=0.3),
            "bias_gqa": partial(biased, heads=Heads(4, 2), shape=(1, 4, QUERIES, KEYS)),
            "bias_v_dim": partial(biased, heads=Heads(v_dim=32)),
            "bias_float32": partial(biased, dtype=torch.float32),
            "bias_minus_infinity": partial(hiding, entry=minus_infinity),
            "bias_lowest": partial(hiding, entry=lowest),
            "bias_lowest_of_half": partial(hiding, entry=lowest, dtype=torch.float16),
            "bias_lowest_of_float32": partial(hiding, entry=lowest, dtype=torch.float32),
            "bias_minus_infinity_causal": partial(hiding, entry=minus_infinity, causal=True),
            "across_blocks": partial(masked, shape=(2, 1, 300, 290), queries=300),
            "across_blocks_bias": partial(biased, shape=(1, 2, 300, 290), queries=300),
        },
    ),
    Case("mask/bias_wants_gradient", "mask", partial(biased, wants_grad=True), grad=True),
    Case("mask/bias_keys_wants_gradient", "mask", partial(biased, shape=(1, 1, 1, KEYS), wants_grad=True), grad=True),
    Case("mask/bias_out", "mask", biased, buffer=contiguous_buffer),
    Case("mask/bias_deterministic", "mask", biased, deterministic=True),
)
