"""What differs between the calls that ranks would make, told alike on every rank: which fields, values and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

#: One rank's call: fields and their values as text; or "refused: why", from a rank that makes none.
Told = Mapping[str, str] | str

#: Characters of a value that are shown, and how many before the first difference.
_SHOWN, _BEFORE = 160, 40
_NOTHING = "(not stated)"


def difference(told: Sequence[Told]) -> str | None:
    """None where all ranks tell the same call; else what differs, one line a field.

    >>> print(difference([{"dtype": "bf16", "causal": "True"}, {"dtype": "fp32", "causal": "True"}]))
    dtype: bf16 on rank 0 but fp32 on rank 1
    """
    if all(one == told[0] for one in told[1:]):
        return None
    refusals = [f"{rank_names([rank])} {one}" for rank, one in enumerate(told) if isinstance(one, str)]
    if refusals:
        return "; ".join(refusals)
    fields = [one for one in told if not isinstance(one, str)]
    names = dict.fromkeys(name for one in fields for name in one)
    values = {name: [one.get(name, _NOTHING) for one in fields] for name in names}
    return "; ".join(_by_value(name, said) for name, said in values.items() if len(set(said)) > 1)


def rank_names(ranks: Sequence[int]) -> str:
    """Ranks for a reader.

    >>> rank_names([3]), rank_names([0, 1, 2, 5])
    ('rank 3', 'ranks 0-2, 5')
    """
    runs = [
        [rank for _, rank in run]
        for _, run in groupby(enumerate(sorted(ranks)), key=lambda numbered: numbered[1] - numbered[0])
    ]
    told = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {told}" if len(ranks) == 1 else f"ranks {told}"


def _by_value(name: str, said: Sequence[str]) -> str:
    """The values of one field, in order of the first rank that has each."""
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(said):
        holders.setdefault(value, []).append(rank)
    alike = next((at for at, letters in enumerate(zip(*holders, strict=False)) if len(set(letters)) > 1), None)
    if alike is None:  # the shortest begins all others
        alike = min(map(len, holders))
    return f"{name}: " + " but ".join(
        f"{_shown(value, alike)} on {rank_names(ranks)}" for value, ranks in holders.items()
    )


def _shown(value: str, alike: int) -> str:
    """A long value from shortly before where it begins to differ from the others."""
    if len(value) <= _SHOWN:
        return value
    start = min(max(alike - _BEFORE, 0), len(value) - _SHOWN)
    end = start + _SHOWN
    return f"{'...' if start else ''}{value[start:end]}{'...' if end < len(value) else ''}"
