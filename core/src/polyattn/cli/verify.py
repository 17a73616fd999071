"""`polyattn verify`: the conformance kit on this machine's backends, counted by structure, each failure by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from polyattn.cli.failure import UsageError
from polyattn.cli.report import Section, show, show_json

if TYPE_CHECKING:
    from polyattn.testing.conformance import Progress

#: Failures of one backend that are printed; JSON has all.
_SHOWN = 10


def verify(platform: str | None, backend: str | None, *, as_json: bool) -> int:
    """Run the kit on the backends that these names leave; 0: all is right, 1: a case failed or nothing could run."""
    from polyattn.testing.conformance import run_conformance

    try:
        with _progress() as progress:
            report = run_conformance(backend, platform, progress)
    except ValueError as error:  # a name that nobody has
        raise UsageError(str(error)) from error
    if as_json:
        show_json(report.as_dict())
    else:
        show(sections_of(report.as_dict()))
    return 0 if report.ok else 1


def sections_of(report: dict[str, Any]) -> list[Section]:
    """The report, as `Report.as_dict` gives it, for people: counts, failures by backend, the verdict last."""
    sections = [
        Section(
            name,
            [(structure, *(str(count) for count in results.values())) for structure, results in structures.items()],
            ("structure", *next(iter(structures.values()))),
        )
        for name, structures in report["counts"].items()
    ]
    sections.append(Section("not run", list(report["skipped"].items())))
    for name in dict.fromkeys(failure["backend"] for failure in report["failures"]):
        wrong = [(f["case"], "; ".join(f["problems"])) for f in report["failures"] if f["backend"] == name]
        title = f"{name}: {len(wrong)} failed" + (f", the first {_SHOWN}" if len(wrong) > _SHOWN else "")
        sections.append(Section(title, wrong[:_SHOWN]))
    ran = [(structure, str(count)) for structure, count in report["cases"].items()]
    sections.append(Section(f"cases run in {report['seconds']:.0f} s", ran))
    sections.append(Section("verdict", [(_verdict(report),)]))
    return sections


def _verdict(report: dict[str, Any]) -> str:
    if report["ok"]:
        return "ok: every claim holds"
    if report["failures"]:
        return f"FAILED: {len(report['failures'])} wrong, named above"
    return "FAILED: no backend could be run"


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """A bar on a terminal where rich is installed, a line that rewrites itself where it is not, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:
        yield _plain_progress
        sys.stderr.write("\r\033[K")
        return
    with Bar(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("verify", total=None)

        def show_bar(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what.split(" ")[0])

        yield show_bar


def _plain_progress(done: int, total: int, what: str) -> None:
    if done % 50 == 0:
        sys.stderr.write(f"\r\033[K{100 * done // total:3d}% {what}")
        sys.stderr.flush()
