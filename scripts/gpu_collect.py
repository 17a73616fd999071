"""Results of the driver's runs, merged into committed records: one JSON a question, the machine written in."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_RESULTS = ("native", "generic", "refused", "failed")
#: Files of the folder that are no record of a question.
_OTHERS = ("state", "facts")
#: Folders of pytest's reports, and the questions that they answer.
_QUESTIONS = {
    "pytest": "Do the tests that need this device pass?",
    "kernels": "Do the tests of the portable kernels pass natively on this device?",
}


def collect(folder: Path, results: Path) -> list[Path]:
    """Write what the folder holds under `results`; the paths written. A run that did not end is never called ok."""
    facts = json.loads((folder / "facts.json").read_text()) if (folder / "facts.json").exists() else {}
    machine = facts.get("machine", {})
    ended = json.loads((folder / "state.json").read_text()) if (folder / "state.json").exists() else {}
    written = []
    for path in sorted(folder.glob("*.json")):
        if path.stem not in _OTHERS:
            record = json.loads(path.read_text())
            written.append(_write(results, path.stem, record))
    backends = conformance(folder / "conformance")
    if backends:
        backends = _beside_earlier([{**backend, "machine": machine} for backend in backends], results, machine)
        question = "Do the backends pass the conformance kit on this device?"
        record = {"question": question, "machine": machine, "ok": all(b["ok"] for b in backends), "backends": backends}
        written.append(_write(results, "conformance", record))
    for name, question in _QUESTIONS.items():
        reports = sorted((folder / name).glob("*.xml"))
        if reports:
            outcome = pytest_outcome(reports)
            status = ended.get(name, {}).get("status", "not known")
            outcome["ok"] = outcome["ok"] and status == "ok"  # a file whose process was stopped left no report
            record = {"question": question, "machine": machine, "section_ended": status}
            written.append(_write(results, name, record | outcome))
    return written


def conformance(folder: Path) -> list[dict[str, Any]]:
    """One entry a backend: counts by structure, failures in words, and whether every planned case ran."""
    stems = sorted({path.name.rsplit(".", 2)[0] for path in folder.glob("*.jsonl")})
    return [_backend(stem, sorted(folder.glob(f"{stem}.*.jsonl"))) for stem in stems]


def _backend(stem: str, paths: Iterable[Path]) -> dict[str, Any]:
    lines = [line for path in paths for line in kept_lines(path)]
    planned = max((line["planned"] for line in lines if "planned" in line), default=0)
    last: dict[str, dict[str, Any]] = {}
    for line in sorted(lines, key=lambda line: line["at"]):
        if "case" in line:
            last[line["case"]] = line
    counts: dict[str, Counter[str]] = {}
    failures = []
    for label, outcome in last.items():
        problems = outcome.get("problems", ["began and did not end"])
        structure = label.partition("/")[0]
        counts.setdefault(structure, Counter())["failed" if problems else outcome["route"]] += 1
        if problems:
            failures.append({"case": label, "problems": problems})
    platform, _, name = stem.partition("_")
    return {
        "backend": f"{platform}:{name}",
        "ok": len(last) == planned > 0 and not failures,
        "planned": planned,
        "ran": len(last),
        "counts": {structure: {word: found[word] for word in _RESULTS} for structure, found in counts.items()},
        "failures": failures,
        "seconds": round(sum(outcome.get("seconds", 0.0) for outcome in last.values()), 1),
    }


def kept_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file of outcomes; one that a stopped process left half is no line."""
    lines = []
    for line in path.read_text().splitlines():
        with suppress(json.JSONDecodeError):
            lines.append(json.loads(line))
    return lines


def pytest_outcome(reports: Iterable[Path]) -> dict[str, Any]:
    """Counts of JUnit reports, why tests were skipped, and which failed."""
    cases = [case for report in reports for case in ElementTree.parse(report).getroot().iter("testcase")]
    wrong = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
    skips = Counter((found.get("message") or "no reason") for c in cases if (found := c.find("skipped")) is not None)
    passed = len(cases) - len(wrong) - sum(skips.values())
    return {
        "ok": passed > 0 and not wrong,
        "passed": passed,
        "failed": [f"{case.get('classname')}::{case.get('name')}" for case in wrong],
        "skipped_because": dict(skips.most_common()),
    }


def _beside_earlier(backends: list[dict[str, Any]], results: Path, machine: dict[str, Any]) -> list[dict[str, Any]]:
    """With those of the record so far that did not run this time, each with the machine that it ran on; by name."""
    path = _path(results, "conformance", machine)
    record = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"backends": []}
    now = {backend["backend"] for backend in backends}
    earlier = [{"machine": record["machine"], **one} for one in record["backends"] if one["backend"] not in now]
    return sorted((*backends, *earlier), key=lambda backend: str(backend["backend"]))


def _write(results: Path, name: str, record: dict[str, Any]) -> Path:
    path = _path(results, name, record.get("machine", {}))
    results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def _path(results: Path, name: str, machine: dict[str, Any]) -> Path:
    return results / f"{name}_{_device(machine)}.json"


def _device(machine: dict[str, Any]) -> str:
    """ "NVIDIA H200" is "h200", "NVIDIA A100-SXM4-80GB" is "a100-sxm4-80gb"."""
    words = re.findall(r"[a-z0-9]+", str(machine.get("device", "")).lower())
    return "-".join(word for word in words if word != "nvidia") or "unknown"
