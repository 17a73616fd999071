"""`run_conformance`: the kit without pytest, and its report."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from polyattn.testing.cases import ALL_CASES, Case
from polyattn.testing.check import check
from polyattn.testing.claims import unaccepted_claims
from polyattn.testing.compare import tolerance_problems
from polyattn.testing.targets import DTYPES, Target, targets

#: Called with (done, total, "cpu:sdpa dense/causal[float32]") before each case.
Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Failure:
    """A case that a backend got wrong."""

    backend: str
    case: str
    problems: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.backend} {self.case}: {'; '.join(self.problems)}"


@dataclass(frozen=True)
class Report:
    """What ran.

    counts     backend -> structure -> {"native", "generic", "refused", "failed"} -> cases
    failures   in the order they were found
    skipped    backend -> why none of its cases ran
    """

    counts: dict[str, dict[str, dict[str, int]]]
    failures: tuple[Failure, ...]
    skipped: dict[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        """Something ran, and nothing failed."""
        return bool(self.counts) and not self.failures

    def cases(self) -> dict[str, int]:
        """Structure -> cases that ran, over all backends."""
        total: Counter[str] = Counter()
        for structures in self.counts.values():
            for structure, results in structures.items():
                total[structure] += sum(results.values())
        return dict(total)

    def as_dict(self) -> dict[str, Any]:
        """A JSON-ready form."""
        return {"ok": self.ok, "cases": self.cases(), **asdict(self)}


def run_conformance(
    backend: str | None = None,
    platform: str | None = None,
    progress: Progress | None = None,
    *,
    structures: Collection[str] | None = None,
    dtypes: Collection[torch.dtype] = DTYPES,
    named: str = "",
    shard: tuple[int, int] = (0, 1),
) -> Report:
    """Put backends to the test: "fa3", "cuda:fa3", all of a platform, or all there are.

    `structures`, `dtypes` and `named` (a part of their names) narrow the cases that run; `shard=(i, n)` leaves the i-th
    of n runs of neighbours, so that n processes share the work and what each compiles is not what all compile. Whether
    each claim is accepted for some case is asked where all cases run, by the first shard. ValueError for a backend or
    platform that is not here, with the reason.

    >>> from polyattn.testing import run_conformance
    >>> run_conformance("cpu:sdpa", structures=["dense"], dtypes=[torch.float64]).ok
    True
    """
    started = time.perf_counter()
    chosen = targets(platform, backend)
    missing = {target.name: "; ".join(target.missing()) for target in chosen if target.missing()}
    ready = [target for target in chosen if target.name not in missing]
    cases = [case for case in ALL_CASES if (structures is None or case.structure in structures) and named in case.name]
    checks = [
        (target, case, dtype)
        for target in ready
        for case in cases
        for dtype in target.dtypes_of(case)
        if dtype in dtypes
    ]
    index, parts = shard
    if not 0 <= index < parts:
        raise ValueError(f"shard: (i, n) with 0 <= i < n is needed, got {shard}")
    checks = checks[len(checks) * index // parts : len(checks) * (index + 1) // parts]
    counts: dict[str, dict[str, dict[str, int]]] = {}
    failures = [
        Failure(target.name, "claims/tolerance", tuple(wrong))
        for target in ready
        if (wrong := tolerance_problems(target.backend.tolerances))
    ]
    for done, (target, case, dtype) in enumerate(checks):
        label = case_label(case, dtype)
        if progress is not None:
            progress(done, len(checks), f"{target.name} {label}")
        outcome = check(case, target, dtype)
        results = counts.setdefault(target.name, {}).setdefault(case.structure, dict.fromkeys(_RESULTS, 0))
        results["failed" if outcome.problems else outcome.route] += 1
        if outcome.problems:
            failures.append(Failure(target.name, label, outcome.problems))
    if structures is None and not named and index == 0:
        failures += _empty_claims(ready)
    return Report(counts, tuple(failures), missing, time.perf_counter() - started)


def case_label(case: Case, dtype: torch.dtype) -> str:
    """ "dense/causal[float32]" """
    return f"{case.name}[{str(dtype).removeprefix('torch.')}]"


def _empty_claims(ready: Iterable[Target]) -> list[Failure]:
    return [
        Failure(target.name, f"claims/{claim}", ("claimed, but not one case of it is accepted",))
        for target in ready
        for claim in unaccepted_claims(target, ALL_CASES)
    ]


_RESULTS = ("native", "generic", "refused", "failed")
