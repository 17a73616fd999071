"""What is left of queries x keys under causal and windows, and how the sparse modes say it; needs no device."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from polyattn.vendor import PackedMeta
from polyattn_npu.bands import UNBOUNDED, band_of, compressed_mask, sparse_mode_args, window_sides
from polyattn_npu.documents import documents_of

CPU = torch.device("cpu")
NAMES = ("pre", "next")
SIDES = (None, -2, -1, 0, 1, 3)


def seen(queries: int, keys: int, left: int | None, right: int | None) -> torch.Tensor:
    """Bool [Sq,Sk], bottom-right aligned."""
    away = torch.arange(keys)[None] - torch.arange(queries)[:, None] - (keys - queries)
    visible = torch.ones(queries, keys, dtype=torch.bool)
    if left is not None:
        visible &= away >= -left
    if right is not None:
        visible &= away <= right
    return visible


@pytest.mark.parametrize(("queries", "keys"), list(product((1, 2, 5), (1, 2, 6))))
def test_a_band_holds_all_that_is_seen_and_no_row_or_end_that_sees_nothing(queries: int, keys: int) -> None:
    for left, right in product(SIDES, SIDES):
        whole = seen(queries, keys, left, right)
        band = band_of(queries, keys, left, right)
        if band is None:
            assert not whole.any()
            continue
        inner = whole[band.q_start : band.q_stop, band.k_start : band.k_stop]
        assert inner.sum() == whole.sum()
        assert inner.any(1).all()
        assert inner[:, 0].any()
        assert inner[:, -1].any()
        assert torch.equal(inner, seen(band.queries, band.keys, band.left, band.right))
        assert all(side is None or side >= 0 for side in (band.left, band.right))


def test_sides_and_modes() -> None:
    assert window_sides(True, None) == (None, 0)
    assert window_sides(True, (2, 5)) == (2, 0)
    assert window_sides(False, (2, None)) == (2, None)
    assert sparse_mode_args(5, 7, None, None, CPU, NAMES) == {}
    assert sparse_mode_args(5, 7, 6, 4, CPU, NAMES) == {}, "every row sees every key"
    assert sparse_mode_args(5, 7, None, 0, CPU, NAMES) == {"atten_mask": compressed_mask(CPU), "sparse_mode": 3}
    band = sparse_mode_args(5, 7, 2, None, CPU, NAMES)
    assert (band["sparse_mode"], band["pre"], band["next"]) == (4, 2, UNBOUNDED)


def test_the_compressed_mask_is_made_once_a_device_and_never_under_a_fake_mode() -> None:
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    assert compressed_mask(CPU) is compressed_mask(CPU)
    with FakeTensorMode():
        assert isinstance(compressed_mask(CPU), FakeTensor)
    assert type(compressed_mask(CPU)) is torch.Tensor
    assert torch.equal(compressed_mask(CPU), torch.ones(2048, 2048, dtype=torch.bool).triu(1))


def meta_of(lengths_q: tuple[int, ...], lengths_k: tuple[int, ...]) -> PackedMeta:
    cu = torch.zeros(len(lengths_q) + 1, dtype=torch.int32)
    return PackedMeta(cu, cu, max(lengths_q), max(lengths_k), lengths_q, lengths_k, None)


def test_documents_keep_their_first_rows_as_views_and_others_by_place() -> None:
    plain = documents_of(meta_of((2, 3), (4, 1)), None, None)
    assert (plain.ends_q, plain.ends_k, plain.rows, plain.keys) == ((2, 5), (4, 5), None, None)
    assert (plain.lengths_q, plain.lengths_k) == ((2, 3), (4, 1))
    causal = documents_of(meta_of((2, 3, 1), (4, 1, 0)), None, 0)
    assert (causal.ends_q, causal.ends_k, causal.keys, causal.longest) == ((2, 3), (4, 5), None, (2, 4))
    assert causal.rows is not None
    assert causal.rows.tolist() == [0, 1, 4]
    window = documents_of(meta_of((1, 1), (4, 2)), 1, 0)
    assert window.keys is not None
    assert window.keys.tolist() == [2, 3, 4, 5]
    assert documents_of(meta_of((2, 0), (0, 3)), None, None).ends_q == ()


@pytest.mark.parametrize(
    ("lengths_q", "lengths_k", "right", "ends_q", "ends_k", "rows"),
    [
        ((2, 1, 3), (2, 1, 3), None, (2, 3, 6), (2, 3, 6), None),
        ((2, 1, 3), (2, 1, 3), 0, (2, 3, 6), (2, 3, 6), None),
        ((2, 4), (5, 2), 0, (2, 4), (5, 7), [0, 1, 4, 5]),
        ((2, 4), (5, 2), None, (2, 6), (5, 7), None),
        ((3, 2), (0, 4), None, (2,), (4,), [3, 4]),
        ((0, 2), (3, 2), 0, (2,), (2,), None),
    ],
)
def test_rows_without_a_key_reach_no_op(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], right: int | None, ends_q: tuple[int, ...],
    ends_k: tuple[int, ...], rows: list[int] | None,
) -> None:  # fmt: skip
    parts = documents_of(meta_of(lengths_q, lengths_k), None, right)
    assert (parts.ends_q, parts.ends_k) == (ends_q, ends_k)
    assert (None if parts.rows is None else parts.rows.tolist()) == rows


def test_the_derivation_is_kept_with_the_documents() -> None:
    meta = meta_of((2, 3), (4, 1))
    assert documents_of(meta, None, 0) is documents_of(meta, None, 0)
    assert documents_of(meta, None, 0) is not documents_of(meta, 1, 0)
