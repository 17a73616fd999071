"""Which part of some keys a block of queries sees: causal, window, documents and spans as pieces of ordinary calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from polyattn.arguments import Window
from polyattn.distributed.rows import Range, Ranges, located


@dataclass(frozen=True)
class Band:
    """Global query rows and key rows that may meet, as far as (left, right) reach beside a diagonal.

    Query row i sits at key position i + shift. `batch`: the samples it is about, None for all. `document`: rows outside
    see none of these keys, so that neighbours may run as one packed call.
    """

    q: Range
    k: Range
    shift: int
    left: int | None = None
    right: int | None = None
    batch: Range | None = None
    document: bool = False


@dataclass(frozen=True)
class Piece:
    """Local query rows and key rows that meet in one ordinary call.

    window     (left, right) beside the bottom-right diagonal of the piece (of each document of it), None unbounded
    documents  (query rows, key rows) of the documents that follow each other in it; empty: it is one piece
    """

    q: Range
    k: Range
    window: tuple[int | None, int | None] = (None, None)
    batch: Range | None = None
    documents: tuple[tuple[int, int], ...] = ()

    @property
    def work(self) -> int:
        """How many pairs of rows see each other."""
        sizes = self.documents or ((self.q[1] - self.q[0], self.k[1] - self.k[0]),)
        return sum(q * k - _hidden(q, k, self.window) for q, k in sizes)


def _hidden(queries: int, keys: int, window: tuple[int | None, int | None]) -> int:
    """Pairs of a document beyond the sides of its bottom-right diagonal."""
    left, right = window
    behind = 0 if right is None else _steps(queries - 1 - right, keys)
    before = 0 if left is None else _steps(keys - 1 - left, queries)
    return behind + before


def _steps(longest: int, most: int) -> int:
    """1 + 2 + ... + longest, of which only the `most` largest count; from the other side, no number above `most`."""
    below = max(longest - most, 0)
    return (longest * (longest + 1) - below * (below + 1)) // 2 if longest > 0 else 0


def cut(band: Band, q: Range, k: Range) -> Band | None:
    """The part of a band among global query rows `q` and key rows `k`, trimmed to rows that see something.

    Its sides are counted from the bottom-right diagonal of what is left.
    """
    (start, stop), (first, end) = (
        (max(q[0], band.q[0]), min(q[1], band.q[1])),
        (max(k[0], band.k[0]), min(k[1], band.k[1])),
    )
    if start >= stop or first >= end:
        return None
    shift, left, right = band.shift, band.left, band.right
    if right is not None:
        end = min(end, stop + shift + right)
        start = max(start, first - shift - right)
    if left is not None:
        first = max(first, start + shift - left)
        stop = min(stop, end + left - shift)
    if start >= stop or first >= end:
        return None
    past = stop + shift - end  # how far the last query sits behind the last key
    return replace(
        band,
        q=(start, stop),
        k=(first, end),
        left=None if left is None else left - past,
        right=None if right is None else right + past,
    )


def pieces_of(bands: Iterable[Band], q_rows: Ranges, k_rows: Ranges) -> tuple[Piece, ...]:
    """The calls in which query rows see what they may of key rows, both held in the order given."""
    pieces: list[Piece] = []
    for band in bands:
        for q in q_rows:
            found = [part for k in k_rows if (part := cut(band, q, k)) is not None]
            for piece in _along_keys([_local(part, q_rows, k_rows) for part in found]):
                _append(pieces, piece)
    return tuple(_settled(piece) for piece in _along_queries(pieces))


def _local(band: Band, q_rows: Ranges, k_rows: Ranges) -> Piece:
    (q,), (k,) = located((band.q,), q_rows), located((band.k,), k_rows)
    documents = ((q[1] - q[0], k[1] - k[0]),) if band.document else ()
    return Piece(q, k, (band.left, band.right), band.batch, documents)


def _along_keys(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring keys of the same queries in one piece: all are seen whole, but for the last, on the diagonal."""
    found: list[Piece] = []
    for piece in pieces:
        before = found[-1] if found else None
        if before is not None and before.k[1] == piece.k[0] and before.q == piece.q and _whole(before):
            left = piece.window[0]
            if left is None or left >= piece.k[1] - piece.k[0] - 1:
                documents = ((piece.q[1] - piece.q[0], piece.k[1] - before.k[0]),) if piece.documents else ()
                window = None, piece.window[1]
                found[-1] = replace(piece, k=(before.k[0], piece.k[1]), window=window, documents=documents)
                continue
        found.append(piece)
    return found


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, as one more document of the last where it follows that and is banded alike."""
    before = pieces[-1] if pieces else None
    if (
        before is not None
        and before.documents
        and piece.documents
        and (before.q[1], before.k[1]) == (piece.q[0], piece.k[0])
        and before.window == piece.window
    ):
        documents = (*before.documents, *piece.documents)
        pieces[-1] = replace(before, q=(before.q[0], piece.q[1]), k=(before.k[0], piece.k[1]), documents=documents)
    else:
        pieces.append(piece)


def _along_queries(pieces: list[Piece]) -> list[Piece]:
    """Neighbouring queries that see the same keys whole, in one piece."""
    found: list[Piece] = []
    for piece in pieces:
        before = found[-1] if found else None
        alike = before is not None and (before.k, before.batch) == (piece.k, piece.batch)
        if before is not None and alike and before.q[1] == piece.q[0] and _whole(before) and _whole(piece):
            documents = ((piece.q[1] - before.q[0], piece.k[1] - piece.k[0]),) if piece.documents else ()
            found[-1] = replace(piece, q=(before.q[0], piece.q[1]), window=(None, None), documents=documents)
        else:
            found.append(piece)
    return found


def _whole(piece: Piece) -> bool:
    return len(piece.documents) < 2 and _sides(piece) == (None, None)


def _sides(piece: Piece) -> tuple[int | None, int | None]:
    """The sides that hide anything."""
    left, right = piece.window
    sizes = piece.documents or ((piece.q[1] - piece.q[0], piece.k[1] - piece.k[0]),)
    if left is not None and all(left >= keys - 1 for _, keys in sizes):
        left = None
    if right is not None and all(right >= queries - 1 for queries, _ in sizes):
        right = None
    return left, right


def _settled(piece: Piece) -> Piece:
    """Sides that hide nothing left out; one document is an ordinary piece."""
    return replace(piece, window=_sides(piece), documents=piece.documents if len(piece.documents) > 1 else ())


def sides(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """(left, right) of a call's arguments in canonical form."""
    left, right = (None, None) if window is None else window
    return left, 0 if causal else right
