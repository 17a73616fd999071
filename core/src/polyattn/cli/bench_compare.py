"""`polyattn bench --compare`: two results side by side; exit code 1 where something became slower."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from polyattn.bench.comparison import Comparison, compare
from polyattn.cli.failure import UsageError
from polyattn.cli.report import Section, show, show_json

_HEADER = ("shape", "backend", "before, ms", "after, ms", "change", "noise", "x fastest", "")


def bench_compare(before: Path, after: Path, *, as_json: bool) -> int:
    """Read, compare and tell; 0: nothing became slower, 1: something did."""
    try:
        comparison = compare(_read(before), _read(after))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise UsageError(f"--compare: results of `polyattn bench --json` are needed ({_word(error)})") from error
    if as_json:
        show_json(_facts(comparison))
    else:
        show(_sections(comparison))
    return 1 if comparison.worse else 0


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path}: no JSON ({error})") from error


def _facts(comparison: Comparison) -> dict[str, Any]:
    changes = [{**asdict(one), "change": one.change, "verdict": one.verdict} for one in comparison.changes]
    return {**asdict(comparison), "changes": changes, "worse": comparison.worse}


def _sections(comparison: Comparison) -> list[Section]:
    rows = [
        (
            one.shape, one.backend, f"{one.before:.4g}", f"{one.after:.4g}", f"{one.change:+.1%}", f"{one.noise:.1%}",
            f"{one.ratio_before:.2f} -> {one.ratio_after:.2f}", "" if one.verdict == "same" else one.verdict,
        )
        for one in comparison.changes
    ]  # fmt: skip
    apart = [(name, f"{old} -> {new}") for name, (old, new) in comparison.apart.items()]
    gone, new = ([(one,) for one in names] for names in (comparison.gone, comparison.new))
    return [
        Section("the machines differ: times may, too", apart),
        Section("compared", rows, _HEADER),
        Section("ran before, not now", gone),
        Section("runs now, not before", new),
    ]


def _word(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)
