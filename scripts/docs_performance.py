"""Tables of the committed measurements: every number from benchmarks/results, with the machine it was taken on."""

from __future__ import annotations

import ast
import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

Record = dict[str, Any]
#: More shapes than these are folded away.
_SHAPES = 6
_UNITS = {"milliseconds": "ms", "microseconds": "us", "tbps": "TB/s"}


def tables(folder: Path) -> str:
    """A section a machine: what it is, then each record that was measured on it."""
    by_machine: dict[str, list[tuple[str, Record]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        if measured := _section(path.name, record):
            by_machine[_name(record["machine"])].append((measured, record))
    sections = []
    for machine, records in by_machine.items():
        facts = {line for _, record in records for line in [_facts(record["machine"])]}
        sections += [f"## {machine}", *sorted(facts), *(text for text, _ in records)]
    return "\n\n".join(sections)


def _section(file: str, record: Record) -> str:
    """One record; empty where it holds no measurement (a run of tests is no performance), or names no machine."""
    if record.get("small") or "machine" not in record or not (record.get("targets") or record.get("comparisons")):
        return ""
    parts = [f"### {_title(file, record)}", f"`benchmarks/results/{file}`"]
    if record.get("targets"):
        parts.append(_targets(record["targets"]))
    shapes = [f"**{name}**\n\n{_comparison(one)}" for name, one in record.get("comparisons", {}).items()]
    parts += shapes if len(shapes) <= _SHAPES else [_folded(f"{len(shapes)} shapes", "\n\n".join(shapes))]
    for unit in ("milliseconds", "microseconds"):
        parts += _plain(record.get(unit, {}), _UNITS[unit])
    return "\n\n".join(part for part in parts if part)


def _targets(targets: dict[str, Record]) -> str:
    rows = []
    for name, target in targets.items():
        bounds = [f"at most {_number(target['at_most'])}"] if "at_most" in target else []
        bounds += [f"at least {_number(target['at_least'])}"] if "at_least" in target else []
        rows.append((name, _number(target["value"]), ", ".join(bounds), "met" if target["met"] else "**missed**"))
    return table(("target", "measured", "wanted", ""), rows)


def _comparison(comparison: Record) -> str:
    """Medians of one shape, side by side; routes where they are recorded."""
    units = [unit for unit in ("milliseconds", "microseconds", "tbps") if isinstance(comparison.get(unit), dict)]
    ratios, base = comparison.get("ratios", {}), comparison.get("base", "")
    routes = comparison.get("routes", {"polyattn": comparison["route"]} if "route" in comparison else {})
    names = list(dict.fromkeys(name for unit in units for name in comparison[unit]))
    head = [
        "",
        *(_UNITS[unit] for unit in units),
        *([f"times {base}"] if ratios else []),
        *(["route"] if routes else []),
    ]
    rows = []
    for name in names:
        row = [name, *(_number(comparison[unit].get(name, "")) for unit in units)]
        row += [_number(ratios.get(name, ""))] if ratios else []
        row += [f"`{routes[name]}`" if name in routes else ""] if routes else []
        rows.append(tuple(row))
    return table(tuple(head), rows) if rows else ""


def _plain(measured: dict[str, Any], unit: str) -> list[str]:
    """Records of a processor: one number or list of rounds a name, or such a table a shape."""
    flat = {name: value for name, value in measured.items() if not isinstance(value, dict)}
    shapes = {name: value for name, value in measured.items() if isinstance(value, dict)}
    parts = []
    if flat:
        parts.append(table(("", f"median, {unit}"), [(name, _number(_median(value))) for name, value in flat.items()]))
    if shapes:
        names = list(dict.fromkeys(name for value in shapes.values() for name in value))
        rows = [
            (shape, *(_number(_median(value[name])) if name in value else "" for name in names))
            for shape, value in shapes.items()
        ]
        parts.append(table((f"median, {unit}", *names), rows))
    return parts


def _median(value: Any) -> float:
    return float(statistics.median(value) if isinstance(value, list) else value)


def _name(machine: Record) -> str:
    return str(machine.get("device") or f"{machine['processor']}, {machine['cores']} cores")


def _facts(machine: Record) -> str:
    """One line about the machine and its software."""
    software = {"torch": machine["torch"]} if "torch" in machine else machine["versions"]
    facts = [f"driver {machine['driver']}"] if "driver" in machine else []
    facts += [f"CUDA {machine['cuda']}"] if "cuda" in machine else []
    facts += [f"{machine['threads']} threads"] if machine.get("threads", 1) != 1 else []
    facts += ["1 thread"] if machine.get("threads") == 1 else []
    facts += [f"Python {machine['python']}", *(f"{name} {version}" for name, version in software.items())]
    return f"Measured {machine['date']}: {', '.join(facts)}."


def _title(file: str, record: Record) -> str:
    """The record's question, or else the first line of the script that asked it."""
    question = str(record.get("question", ""))
    script = Path(__file__).resolve().parents[1] / "benchmarks" / f"{Path(file).stem}.py"
    if not question and script.exists():
        question = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").splitlines()[0].rstrip(".")
    question = question or Path(file).stem
    return question[0].upper() + question[1:]


def _folded(title: str, text: str) -> str:
    inside = "\n".join(f"    {line}" if line else "" for line in text.splitlines())
    return f'??? note "{title}"\n\n{inside}'


def _number(value: Any) -> str:
    """Four digits are more than any of them deserves."""
    return value if isinstance(value, str) else f"{value:.4g}" if abs(value) < 10_000 else f"{value:.0f}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; a bar in a cell would end it."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
