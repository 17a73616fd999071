"""The record of one run of the tests on one torch: what ran, on what, with which outcome."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from xml.etree import ElementTree

FACTS = """
import json, platform, torch
print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine(),
                  "system": platform.system(), "threads": torch.get_num_threads()}))
"""


def write_record(path: Path, report: Path, python: str, rooms: Sequence[str]) -> str:
    """Write pytest's report and the facts of its environment as JSON; the line that tells it."""
    facts = json.loads(subprocess.check_output([python, "-c", FACTS], text=True))
    counts, why = outcome(report), skips(report)
    day = datetime.now(timezone.utc).date().isoformat()
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**facts, "tests": list(rooms), **counts, "skipped_because": why, "date": day}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    told = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"torch {facts['torch']}, Python {facts['python']}: {told}"


def outcome(report: Path) -> dict[str, int]:
    """Passed, failed and skipped of a JUnit report; an error of a fixture counts as failed."""
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))

    def total(*names: str) -> int:
        return sum(int(suite.get(name, 0)) for suite in suites for name in names)

    failed, skipped = total("failures", "errors"), total("skipped")
    return {"passed": total("tests") - failed - skipped, "failed": failed, "skipped": skipped}


def skips(report: Path) -> dict[str, int]:
    """Why tests did not run, each reason with their number; an expected failure is one of them, by its reason."""
    found = Counter(skip.get("message") or "no reason" for skip in ElementTree.parse(report).getroot().iter("skipped"))
    return dict(found.most_common())
