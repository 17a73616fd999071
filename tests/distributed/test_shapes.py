"""Uneven and empty shards, odd numbers of heads, cross attention, strides, dtypes: still one rank's answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.pool import Pool
from tests.distributed.test_equal_to_one_rank import name_of

STRATEGIES = [{"ulysses": 4}, {"ring": 4}, {"gather": 4}, {"ulysses": 2, "ring": 2}, {"ulysses": 2, "gather": 2}]
HELD = ["nothing", "both apart", "joint front", "keys' prefix counted"]
each_strategy = pytest.mark.parametrize("degrees", STRATEGIES, ids=name_of)


def worst(pool: Pool, degrees: dict[str, int], structure: str, held: list[str] | None = None, **more: Any) -> float:
    """The largest difference from one rank's answer or gradient, over all ranks."""
    answers = pool.run(
        4, "tests.distributed.glued_cases:outcomes", degrees, structure, HELD if held is None else held, more
    )
    return max(apart for answer in answers for found in answer.values() for apart in found.values())


@each_strategy
@pytest.mark.parametrize("structure", ["causal", "tail padding", "window"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_fewer_rows_than_ranks_and_a_few_more(pool: Pool, degrees: dict[str, int], structure: str, rows: int) -> None:
    assert worst(pool, degrees, structure, rows=rows, kv_rows=rows, state=rows, grad=True) < 1e-5


@each_strategy
@pytest.mark.parametrize("structure", ["causal", "causal documents", "mask of pairs"])
def test_rows_as_the_caller_spreads_them(pool: Pool, degrees: dict[str, int], structure: str) -> None:
    assert worst(pool, degrees, structure, state=(0, 9, 1, 3), grad=True) < 1e-5


@each_strategy
@pytest.mark.parametrize("structure", ["dense", "causal", "causal window", "mask of pairs", "padding everywhere"])
@pytest.mark.parametrize(("rows", "kv_rows"), [(13, 6), (5, 17), (8, 2)])
def test_keys_of_another_length_than_queries(
    pool: Pool, degrees: dict[str, int], structure: str, rows: int, kv_rows: int
) -> None:
    asked = {"rows": rows, "kv_rows": kv_rows, "state": rows, "state_kv": kv_rows}
    assert worst(pool, degrees, structure, grad=True, **asked) < 1e-5


# fault_cases row 30, and every way in which heads, KV heads and ranks may fail to divide each other
@each_strategy
@pytest.mark.parametrize("heads", [(28, 7), (8, 2), (30, 30), (6, 1), (3, 3), (5, 5), (6, 2), (1, 1)], ids=str)
def test_heads_that_ranks_do_not_divide(pool: Pool, degrees: dict[str, int], heads: tuple[int, int]) -> None:
    assert worst(pool, degrees, "causal", heads=heads, grad=True) < 1e-5


@each_strategy
def test_any_strides(pool: Pool, degrees: dict[str, int]) -> None:
    assert worst(pool, degrees, "causal", ["nothing", "both apart"], strided=True) < 1e-5


@each_strategy
def test_half_precision_is_merged_in_float32(pool: Pool, degrees: dict[str, int]) -> None:
    assert worst(pool, degrees, "causal", dtype=torch.bfloat16) < 2e-2


@each_strategy
def test_double_precision_is_kept(pool: Pool, degrees: dict[str, int]) -> None:
    got = worst(pool, degrees, "causal", dtype=torch.float64, grad=True, lse_grad=False)
    assert got < 1e-6


@each_strategy
def test_gradients_without_an_lse(pool: Pool, degrees: dict[str, int]) -> None:
    assert worst(pool, degrees, "tail padding", grad=True, lse_grad=False) < 1e-5


@pytest.mark.parametrize(
    "structure",
    ["dense", "causal", "window", "padding everywhere", "tail padding", "mask of pairs", "spans", "documents"],
)
@each_strategy
def test_complete_keys_on_every_rank(pool: Pool, degrees: dict[str, int], structure: str) -> None:
    assert worst(pool, degrees, structure, complete=True) < 1e-5
