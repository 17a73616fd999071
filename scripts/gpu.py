"""The driver of everything that needs a GPU: named sections, each with a time budget, resumable.

    python scripts/gpu.py list
    python scripts/gpu.py run --out build/gpu --jobs 12 --seconds 570
    python scripts/gpu.py run --out build/gpu --only conformance:fa3,bench:dense
    python scripts/gpu.py collect build/gpu      (into benchmarks/results/)

A section that ran to its end is not run again, but with --again; one that was interrupted goes on where it was. A
section is a process of its own: a hang or a crash costs its budget and no more. Logs are in OUT/logs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_collect import collect
from gpu_running import Section, run_sections, summary
from gpu_sections import EXPECTED, sections_of

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run, list or collect; 0 where every section asked for is ok."""
    asked = _parser().parse_args()
    if asked.command == "collect":
        for path in collect(asked.folder, asked.results):
            print(path)
        return 0
    try:
        sections = chosen(asked.platform, asked.shards, asked.small, asked.only, asked.skip)
    except ValueError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    if asked.command == "list":
        for section in sections:
            print(f"{section.name:<28} {len(section.parts)} x {section.seconds:.0f} s")
        return 0
    ended = run_sections(
        sections, asked.out.absolute(), jobs=asked.jobs, seconds=asked.seconds, cwd=ROOT, again=asked.again
    )
    print(f"\n{summary(ended)}")
    return 0 if all(one.status == "ok" for one in ended.values()) else 1


def chosen(platform: str, shards: int, small: bool, only: Sequence[str], skip: Sequence[str]) -> list[Section]:
    """The sections that these names leave; "conformance" stands for all that start with it and a colon."""
    sections = sections_of(platform, shards=shards, small=small, root=ROOT)
    known = {section.name for section in sections} | {section.name.partition(":")[0] for section in sections}
    unknown = [name for name in (*only, *skip) if name not in known]
    if unknown:
        raise ValueError(
            f"no section {', '.join(unknown)}; there are {', '.join(section.name for section in sections)}"
        )
    return [s for s in sections if (not only or _among(s, only)) and not _among(s, skip)]


def _among(section: Section, names: Sequence[str]) -> bool:
    return section.name in names or section.name.partition(":")[0] in names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the sections that have not ended yet, each within its budget")
    listing = commands.add_parser("list", help="name the sections, with their parts and each part's budget")
    collecting = commands.add_parser("collect", help="merge what runs left in OUT into one record a question")
    for command in (run, listing):
        command.add_argument("--platform", choices=sorted(EXPECTED), default="cuda", help="cpu: a look at the code")
        command.add_argument("--only", type=_names, default=(), metavar="A,B")
        command.add_argument("--skip", type=_names, default=(), metavar="A,B")
        command.add_argument("--shards", type=int, default=4, help="processes for each backend's conformance")
        command.add_argument("--small", action="store_true", help="scale benchmarks down")
    run.add_argument("--out", type=Path, required=True, help="results, logs and the state to resume from")
    run.add_argument("--jobs", type=int, default=4, help="processes at a time, where nothing is timed")
    run.add_argument("--seconds", type=float, default=1e6, help="for all of this run; what is running then is stopped")
    run.add_argument("--again", action="store_true", help="forget what these sections did before")
    collecting.add_argument("folder", type=Path, help="the --out of the runs")
    collecting.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    return parser


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


if __name__ == "__main__":
    sys.exit(main())
