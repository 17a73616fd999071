"""One part of a backend's conformance cases, within a time limit; each outcome is kept at once, so that it resumes.

python scripts/gpu_conformance.py cuda:fa3 --records build/gpu/conformance [--part 0/4] [--seconds 300]

Ends with 0 where every case of the part passed, 1 where one did not, 3 where time was up, 4 where the device or a case
is lost and the rest needs a new process. A case that began and never ended has failed.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from polyattn.testing.cases import ALL_CASES
from polyattn.testing.check import Outcome, check
from polyattn.testing.claims import unaccepted_claims
from polyattn.testing.compare import tolerance_problems
from polyattn.testing.conformance import case_label
from polyattn.testing.targets import Target, targets

OK, FAILED, UNFINISHED, LOST = 0, 1, 3, 4
CLAIMS = "claims"


@dataclass
class Record:
    """The outcomes kept for one backend, by all parts; the last line of a case counts."""

    folder: Path
    backend: str
    part: str
    known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(self.folder.glob(f"{self._stem}.*.jsonl")):
            for line in path.read_text().splitlines():
                outcome = parsed(line)
                if "case" in outcome:
                    self.known[outcome["case"]] = outcome
        for label, outcome in list(self.known.items()):
            if "problems" not in outcome:
                why = "began and did not end: the process died in it, or it hung"
                self.known[label] = {**outcome, "route": "failed", "problems": [why]}

    @property
    def _stem(self) -> str:
        return self.backend.replace(":", "_")

    def keep(self, **facts: Any) -> None:
        """Append one line."""
        facts = {**facts, "at": time.time()}
        with (self.folder / f"{self._stem}.{self.part.replace('/', 'of')}.jsonl").open("a") as file:
            file.write(json.dumps(facts) + "\n")
        if "case" in facts:
            self.known[facts["case"]] = facts

    def due(self, label: str, since: float) -> bool:
        """A case that never passed, and did not fail in this very run of the section."""
        outcome = self.known.get(label)
        return outcome is None or (bool(outcome["problems"]) and outcome["at"] < since)


def parsed(line: str) -> dict[str, Any]:
    """A kept line; nothing where the process was stopped while it wrote it."""
    try:
        return dict(json.loads(line))
    except json.JSONDecodeError:
        return {}


class Watch:
    """Within its context, ends the process where one case takes too long: hung kernels do not return."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._deadline, self._over = seconds, float("inf"), threading.Event()

    def __enter__(self) -> Watch:
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def restart(self) -> None:
        """A case begins."""
        self._deadline = time.monotonic() + self._seconds

    def _run(self) -> None:
        while not self._over.wait(0.5):
            if time.monotonic() >= self._deadline:
                faulthandler.dump_traceback(all_threads=True)
                os._exit(LOST)


def main() -> int:
    """Run the part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("backend", help="platform:backend")
    parser.add_argument("--records", type=Path, required=True, help="folder of outcomes")
    parser.add_argument("--part", default="0/1", help="number/of")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="from now; unfinished is told as such")
    parser.add_argument("--until", type=float, default=float("inf"), help="or until then, seconds since the epoch")
    parser.add_argument("--case-seconds", type=float, default=90.0, help="a case that takes longer is given up")
    parser.add_argument("--since", type=float, default=time.time(), help="failures since then are not tried again")
    parser.add_argument("--structures", default="", help="only these, a,b")
    asked = parser.parse_args()
    end = min(time.time() + asked.seconds, asked.until)
    (target,) = targets(None, asked.backend)
    if target.missing():
        print(f"{target.name}: cannot run here: {'; '.join(target.missing())}")
        return FAILED
    record = Record(asked.records, target.name, asked.part)
    labels = list(planned(target, set(filter(None, asked.structures.split(",")))))
    number, _, of = asked.part.partition("/")
    mine = labels[int(number) :: int(of)]
    record.keep(part=asked.part, planned=len(labels), structures=asked.structures, device=str(target.device))
    with Watch(asked.case_seconds) as watch:
        for label in mine:
            if time.time() >= end:
                break
            if record.due(label, asked.since):
                record.keep(case=label)
                watch.restart()
                began = time.monotonic()
                outcome = outcome_of(target, label)
                record.keep(
                    case=label,
                    route=outcome.route,
                    problems=outcome.problems,
                    seconds=round(time.monotonic() - began, 3),
                )
                if outcome.problems and is_lost(target):
                    print(f"{target.name} {label}: {'; '.join(outcome.problems)}")
                    return LOST
    return told(target, record, mine)


def planned(target: Target, structures: set[str]) -> Iterator[str]:
    """Labels of all cases of a backend; its claims last, where all structures are asked."""
    for case in ALL_CASES:
        if not structures or case.structure in structures:
            for dtype in target.dtypes_of(case):
                yield case_label(case, dtype)
    if not structures:
        yield CLAIMS


def outcome_of(target: Target, label: str) -> Outcome:
    """Run one case by its label."""
    if label == CLAIMS:
        wrong = tolerance_problems(target.backend.tolerances)
        wrong += [f"{claim}: not one case is accepted" for claim in unaccepted_claims(target, ALL_CASES)]
        return Outcome("native", tuple(wrong))
    name, _, dtype = label.removesuffix("]").rpartition("[")
    case = next(case for case in ALL_CASES if case.name == name)
    return check(case, target, getattr(torch, dtype))


def is_lost(target: Target) -> bool:
    """Whether the device answers no more; after some errors every later call fails, whoever makes it."""
    try:
        torch.zeros(1, device=target.device).add_(1).cpu()
    except RuntimeError:
        return True
    return False


def told(target: Target, record: Record, mine: list[str]) -> int:
    """Print how the part stands: failures by name, then one line."""
    ran = [label for label in mine if label in record.known]
    failed = [label for label in ran if record.known[label]["problems"]]
    for label in failed:
        print(f"FAILED {target.name} {label}: {'; '.join(record.known[label]['problems'])}"[:600])
    print(f"{target.name} part {record.part}: {len(ran)} of {len(mine)} cases ran, {len(failed)} failed")
    if len(ran) < len(mine):
        return UNFINISHED
    return FAILED if failed else OK


if __name__ == "__main__":
    sys.exit(main())
