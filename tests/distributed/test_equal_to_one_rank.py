"""Every strategy, structure and way to hold tokens on all ranks gives one rank's answer: output, LSE, gradients."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.glued_cases import HELD, SQUARE
from tests.distributed.pool import Pool


def name_of(degrees: dict[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in degrees.items())


CASES = "tests.distributed.glued_cases"
CUT = [
    "dense",
    "softcap",
    "causal",
    "window",
    "causal window",
    "tail padding",
    "padding everywhere",
    "causal padding",
    "pads alone on a rank",
    "mask of keys",
    "mask of pairs",
    "additive mask of heads",
    "documents",
    "causal documents",
    "causal documents in a window",
    "spanned documents",
    "spans",
    "spans of each sample",
]
#: Structures that need every row beside each other, which ulysses alone provides.
WHOLE = ["video tiles", "block map"]
STRATEGIES = [
    {"ulysses": 2},
    {"ring": 2},
    {"gather": 2},
    {"ulysses": 3},
    {"ring": 3},
    {"gather": 3},
    {"ulysses": 2, "ring": 2},
    {"ulysses": 2, "gather": 2},
    {"ulysses": 4},
    {"ring": 4},
]
PAIRS = [
    pytest.param(degrees, structure, id=f"{name_of(degrees)}-{structure}")
    for degrees in STRATEGIES
    for structure in (CUT if {"ring", "gather"} & set(degrees) else [*CUT, *WHOLE])
]
MORE_RANKS = [{"ulysses": 8}, {"ulysses": 2, "ring": 4}, {"ulysses": 4, "gather": 2}, {"ring": 8}]


def check(pool: Pool, degrees: dict[str, int], structure: str, **more: Any) -> None:
    """Float32 to 1e-5 on every rank, for everything that ranks may hold."""
    world = 1
    for size in degrees.values():
        world *= size
    held = [name for name in HELD if structure not in SQUARE or "keys" not in name]
    answers = pool.run(world, f"{CASES}:outcomes", degrees, structure, held, more)
    wrong = {
        (rank, name, what): apart
        for rank, answer in enumerate(answers)
        for name, found in answer.items()
        for what, apart in found.items()
        if apart > 1e-5
    }
    assert not wrong


@pytest.mark.parametrize(("degrees", "structure"), PAIRS)
def test_the_answer_is_one_rank_s(pool: Pool, degrees: dict[str, int], structure: str) -> None:
    check(pool, degrees, structure)


@pytest.mark.parametrize(("degrees", "structure"), PAIRS)
def test_the_gradients_of_all_ranks_add_up_to_one_rank_s(pool: Pool, degrees: dict[str, int], structure: str) -> None:
    check(pool, degrees, structure, grad=True)


@pytest.mark.slow
@pytest.mark.parametrize("structure", CUT)
@pytest.mark.parametrize("degrees", MORE_RANKS, ids=name_of)
def test_eight_ranks(pool: Pool, degrees: dict[str, int], structure: str) -> None:
    check(pool, degrees, structure, grad=True)
