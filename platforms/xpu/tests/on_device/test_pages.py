"""Pages against the reference: rows that end with a step and are read where they are, and others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.xpu.tests.on_device.here import MARK, assert_near, attend, drawn, exact
from polyattn_xpu import XpuOptions

pytestmark = MARK

#: Rows' kept keys, their pages of 64 rows, how many queries; an entry past a length names no page.
ROWS = {
    "ends": ([64, 128, 192], 5),
    "one query": ([128, 64, 64], 1),
    "short": ([130, 1, 70], 3),
    "long": ([192, 128, 192], 40),
}
TABLE = [[3, 1, 0], [2, 5, -1], [4, 0, 6]]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["batched", "packed"])
@pytest.mark.parametrize("case", ROWS)
def test_pages_equal_the_reference(case: str, layout: str, causal: bool) -> None:
    lengths, queries = ROWS[case]
    k, v = (drawn(7, 64, 2, 64, seed=seed) for seed in (1, 2))
    q = drawn(3, queries, 4, 64)
    vouched: dict[str, Any] = {"options": (XpuOptions(finite_pages=True),)} if case == "short" else {}
    structure = pa.Paged(TABLE, lengths, None if layout == "batched" else [min(queries, kept) for kept in lengths])
    given = q if layout == "batched" else torch.cat([q[row, : min(queries, kept)] for row, kept in enumerate(lengths)])
    out = attend("vllm_xpu", given, k, v, structure=structure, causal=causal, **vouched)
    assert_near(out, exact(given, k, v, structure=structure, causal=causal))


def test_a_row_without_keys_among_pages_in_place_is_zero() -> None:
    k, v = (drawn(7, 64, 2, 64, seed=seed) for seed in (1, 2))
    q = drawn(3, 2, 4, 64)
    structure = pa.Paged([[-1, -1, -1], *TABLE[1:]], [0, 64, 128])
    out = attend("vllm_xpu", q, k, v, structure=structure, causal=True)
    assert_near(out, exact(q, k, v, structure=structure, causal=True))
    assert bool((out[0] == 0).all())
