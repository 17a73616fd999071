"""How evenly the work of a call lies on the places that share its rows, and whether another order is worth it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from polyattn.distributed.rows import Ranges, Spread, joined
from polyattn.distributed.visible import Band, pieces_of

#: Rows change places for a balanced ring where that spares the busiest place at least this share of its work.
_WORTH_MOVING = 0.2


def pairs_of(bands: Iterable[Band], q_rows: Ranges, k_rows: Ranges, batch: int = 1) -> int:
    """About how many pairs of query and key rows are computed, over all samples."""
    return sum(
        piece.work * (batch if piece.batch is None else piece.batch[1] - piece.batch[0])
        for piece in pieces_of(bands, q_rows, k_rows)
    )


def busiest(spread: Spread, bands: list[Band], batch: int = 1) -> int:
    """The pairs of the place that has most."""
    keys = joined(((0, spread.k.total),))
    return max(pairs_of(bands, spread.queries(place), keys, batch) for place in range(spread.places))


def balanced(spread: Spread, bands: list[Band]) -> tuple[Spread, str]:
    """Rows in zigzag order where that makes the busiest place's work enough smaller."""
    passed = f"ring: keys and values go around {spread.places} places"
    if all(band.right is None for band in bands):
        return spread, passed
    zigzag = replace(spread, zigzag=True)
    plain_work, zigzag_work = busiest(spread, bands), busiest(zigzag, bands)
    if zigzag_work > (1.0 - _WORTH_MOVING) * plain_work or not plain_work:
        return spread, passed
    return zigzag, f"{passed}; rows in zigzag order, which spares the busiest {1 - zigzag_work / plain_work:.0%}"
