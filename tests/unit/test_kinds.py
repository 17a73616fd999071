"""Which kind a structure is routed as: key padding that keeps one prefix is a slice where that moves no diagonal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn import KeyPadding, explain


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, (1, 1)])
@pytest.mark.parametrize("queries", ["same", "all"])
def test_a_slice_of_the_keys_never_stands_below_the_diagonal_that_all_queries_have(
    queries: Any, causal: bool, window: tuple[int, int] | None
) -> None:
    q = torch.zeros(2, 8, 2, 64)
    structure = KeyPadding.from_lengths([5, 5], 8, queries=queries)
    kind = explain(q, q, q, structure=structure, causal=causal, window=window).request.structure_kind
    moves = queries == "all" and (causal or window is not None)
    assert kind == ("key_padding" if moves else "prefix_kv")
