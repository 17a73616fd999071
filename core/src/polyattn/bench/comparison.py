"""Two results of `polyattn bench --json` side by side: what became slower by more than its rounds scatter.

Both hold times of runs apart, so that a change is told only where it is larger than the noise that the rounds of each
run show, and than `LEAST`. Ratios to the fastest backend of the same run are compared beside the times: they hold
where clocks differ.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

#: The least change that is told, whatever the rounds say.
LEAST = 0.03


@dataclass(frozen=True)
class Change:
    """One backend on one shape, in both results.

    before, after              milliseconds, medians
    ratio_before, ratio_after  times the fastest backend of its run
    noise                      how far the rounds scatter: the larger interquartile range of both, of the median
    """

    shape: str
    backend: str
    before: float
    after: float
    ratio_before: float
    ratio_after: float
    noise: float

    @property
    def change(self) -> float:
        """0.1 is 10% slower."""
        return self.after / self.before - 1

    @property
    def verdict(self) -> str:
        """ "slower", "faster" or "same"."""
        if abs(self.change) <= max(LEAST, self.noise):
            return "same"
        return "slower" if self.change > 0 else "faster"


@dataclass(frozen=True)
class Comparison:
    """All changes, and what cannot be compared.

    apart   where the two machines differ: name -> (before, after)
    gone    "shape: backend" that ran before and does not now; `new` the other way round
    """

    changes: tuple[Change, ...]
    apart: Mapping[str, tuple[str, str]]
    gone: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def worse(self) -> bool:
        """Whether something is slower or gone."""
        return bool(self.gone) or any(change.verdict == "slower" for change in self.changes)


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Of two results of `bench --json`; KeyError, TypeError or ValueError where one is none."""
    old, new = (dict(_rows(result)) for result in (before, after))
    changes = tuple(
        Change(
            shape, backend, was["milliseconds"], row["milliseconds"], was["ratio"], row["ratio"],
            max(_scatter(was["rounds"]), _scatter(row["rounds"])),
        )
        for (shape, backend), was in old.items()
        if (row := new.get((shape, backend))) is not None
    )  # fmt: skip
    measured = {shape for shape, _ in new}
    gone = tuple(": ".join(key) for key in old if key not in new and key[0] in measured)
    came = tuple(": ".join(key) for key in new if key not in old)
    return Comparison(changes, _apart(before["machine"], after["machine"]), gone, came)


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str], Mapping[str, Any]]]:
    for name, shape in result["shapes"].items():
        what = f"{name} {shape['dtype']}" + (", small" if shape["small"] else "")
        for row in shape["backends"]:
            yield (what, row["backend"]), row


def _apart(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    facts = [{"device": m["name"], "arch": m["arch"], **m["versions"]} for m in (before, after)]
    names = sorted({*facts[0], *facts[1]})
    told = {name: (str(facts[0].get(name, "-")), str(facts[1].get(name, "-"))) for name in names}
    return {name: pair for name, pair in told.items() if pair[0] != pair[1]}


def _scatter(rounds: list[float]) -> float:
    """The interquartile range of the rounds, of their median; of too few, their range."""
    middle = statistics.median(rounds)
    if len(rounds) < 4:
        return (max(rounds) - min(rounds)) / middle
    low, _, high = statistics.quantiles(rounds, n=4)
    return (high - low) / middle
