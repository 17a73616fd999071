"""Pieces of ordinary calls see exactly what the band says, pair by pair, for any cut of queries and keys."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polyattn.distributed.rows import Ranges, size
from polyattn.distributed.visible import Band, Piece, pieces_of

SIDES = st.one_of(st.none(), st.integers(0, 6))
ROWS = 12


@st.composite
def cuts(draw: st.DrawFn, rows: int) -> Ranges:
    """Ascending disjoint ranges within `rows`, as a rank may hold them."""
    bounds = sorted(draw(st.sets(st.integers(0, rows), min_size=2, max_size=6)))
    pairs = list(zip(bounds[::2], bounds[1::2], strict=False))
    return tuple(pairs)


def meant(bands: list[Band], queries: Ranges, keys: Ranges) -> torch.Tensor:
    """How often each held query row sees each held key row, by the words of `Band`."""
    count = torch.zeros(ROWS + 8, ROWS + 8, dtype=torch.int64)
    for band in bands:
        for i in range(*band.q):
            for j in range(*band.k):
                left = band.left is None or j >= i + band.shift - band.left
                right = band.right is None or j <= i + band.shift + band.right
                count[i, j] += left and right
    rows = torch.cat([torch.arange(*pair) for pair in queries])
    columns = torch.cat([torch.arange(*pair) for pair in keys])
    return count[rows][:, columns]


def called(pieces: tuple[Piece, ...], queries: int, keys: int) -> torch.Tensor:
    """How often the pieces' calls see each pair: bottom-right alignment in each document."""
    count = torch.zeros(queries, keys, dtype=torch.int64)
    for piece in pieces:
        documents = piece.documents or ((piece.q[1] - piece.q[0], piece.k[1] - piece.k[0]),)
        (q0, _), (k0, _) = piece.q, piece.k
        for q, k in documents:
            position = torch.arange(q)[:, None] + k - q
            key = torch.arange(k)[None, :]
            left, right = piece.window
            visible = torch.ones(q, k, dtype=torch.bool)
            if left is not None:
                assert left >= 0
                visible &= key >= position - left
            if right is not None:
                assert right >= 0
                visible &= key <= position + right
            count[q0 : q0 + q, k0 : k0 + k] += visible
            q0, k0 = q0 + q, k0 + k
        assert (q0, k0) == (piece.q[1], piece.k[1]), "documents fill their piece"
    return count


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_a_band_is_seen_once_and_nothing_else(data: st.DataObject) -> None:
    queries, keys = data.draw(st.integers(1, ROWS)), data.draw(st.integers(1, ROWS))
    band = Band((0, queries), (0, keys), keys - queries, data.draw(SIDES), data.draw(SIDES))
    q, k = data.draw(cuts(queries)), data.draw(cuts(keys))
    pieces = pieces_of([band], q, k)
    assert torch.equal(called(pieces, size(q), size(k)), meant([band], q, k))
    assert sum(piece.work for piece in pieces) == meant([band], q, k).sum()


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_documents_cut_anywhere_stay_apart(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4))
    left, right = data.draw(SIDES), data.draw(SIDES)
    bands, q_end, k_end = [], 0, 0
    for q, k in lengths:
        bands.append(Band((q_end, q_end + q), (k_end, k_end + k), k_end + k - q_end - q, left, right, document=True))
        q_end, k_end = q_end + q, k_end + k
    q, k = data.draw(cuts(q_end + 2)), data.draw(cuts(k_end + 2))
    pieces = pieces_of(bands, q, k)
    assert torch.equal(called(pieces, size(q), size(k)), meant(bands, q, k))
    assert sum(piece.work for piece in pieces) == meant(bands, q, k).sum()


def test_what_every_rank_holds_and_its_own_shard_are_one_causal_call() -> None:
    band = Band((0, 12), (0, 12), 0, right=0)
    assert pieces_of([band], ((6, 9),), ((0, 2), (6, 9))) == (Piece((0, 3), (0, 5), (None, 0)),)


def test_dense_rows_are_one_call_whatever_ranges_they_are_in() -> None:
    band = Band((0, 12), (0, 12), 0)
    assert pieces_of([band], ((0, 2), (6, 9)), ((0, 2), (6, 9), (11, 12))) == (Piece((0, 5), (0, 6)),)


def test_whole_documents_are_one_packed_call() -> None:
    bands = [Band((a, b), (a, b), 0, right=0, document=True) for a, b in ((0, 4), (4, 5), (5, 9))]
    assert pieces_of(bands, ((0, 9),), ((0, 9),)) == (Piece((0, 9), (0, 9), (None, 0), None, ((4, 4), (1, 1), (4, 4))),)


def test_keys_behind_all_queries_are_no_call() -> None:
    assert pieces_of([Band((0, 12), (0, 12), 0, right=0)], ((0, 6),), ((6, 12),)) == ()
