"""Documents that a kernel's tiles would mix are kept apart: what is strange stays where it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn_musa.apart import apart, in_tiles

INF, NAN = float("inf"), float("nan")


def mean_of_all(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: Any, **call: Any) -> Any:
    """A kernel whose one tile holds every document: any NaN reaches every row."""
    return v.mean(0, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1).expand(q.shape).contiguous(), None


def boundaries(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize(("place", "value", "rows"), [
    (0, NAN, [NAN, NAN, 0, 0, 0]), (2, INF, [0, 0, INF, INF, 0]), (3, -INF, [0, 0, -INF, -INF, 0]),
    (4, NAN, [0, 0, 0, 0, 0]),
])  # fmt: skip
def test_what_is_strange_reaches_its_own_document_alone(place: int, value: float, rows: list[float]) -> None:
    v = torch.zeros(5, 1, 8)  # documents of two keys each; the last row is no one's
    v[place] = value
    given = v.clone()
    out, lse = apart(mean_of_all, torch.zeros(5, 2, 8), v, v, None, cu_q=boundaries(0, 2, 4), cu_k=boundaries(0, 2, 4))
    want = torch.tensor(rows, dtype=torch.float32)[:, None, None].expand(5, 2, 8)
    torch.testing.assert_close(out, want, equal_nan=True)
    assert lse is None
    torch.testing.assert_close(v, given, equal_nan=True)


def test_heads_that_share_a_kv_head_get_its_own() -> None:
    v = torch.zeros(2, 2, 8)
    v[0, 1] = NAN
    out, _ = apart(mean_of_all, torch.zeros(2, 4, 8), v, v, None, cu_q=boundaries(0, 2), cu_k=boundaries(0, 2))
    assert out[:, :2].eq(0).all()
    assert out[:, 2:].isnan().all()


def test_documents_that_end_with_tiles_need_nothing() -> None:
    assert in_tiles((64, 128, 7))
    assert in_tiles((5,))
    assert not in_tiles((63, 64))
    assert not in_tiles((32, 64)), "a tile has 64 keys, and half of one ends none"
    assert not in_tiles(None)
