"""How commands print: sections of text, with rich on a terminal where it is installed, else plain and aligned.

A section is data made from a command's JSON, so that tables and `--json` cannot disagree.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO


@dataclass(frozen=True)
class Section:
    """A titled table; without a header its rows are names and values, or lines of text."""

    title: str
    rows: Sequence[tuple[str, ...]]
    header: tuple[str, ...] = ()


#: Words that rich shows in a colour of their own.
_STYLES = {
    "accepted": "green", "chosen": "green", "usable": "green", "yes": "green",
    "declined": "yellow", "skipped": "yellow", "missing package": "yellow", "not chosen": "yellow",
    "failed": "red", "cannot run": "red", "error": "red",
}  # fmt: skip


def show(sections: Iterable[Section]) -> None:
    """Print sections to standard output: with rich on a terminal, else as plain text. Empty ones are left out."""
    shown = [section for section in sections if section.rows]
    console = _terminal(sys.stdout)
    if console is None:
        _write(plain(shown))
    else:
        print_rich(shown, console)


def show_json(data: Any) -> None:
    """Print data as JSON."""
    _write(json.dumps(data, indent=2, default=str) + "\n")


def plain(sections: Iterable[Section]) -> str:
    """Aligned text: a title, then its rows indented by two; a blank line between sections."""
    return "\n".join("\n".join([section.title, *_aligned(section)]) + "\n" for section in sections)


def print_rich(sections: Iterable[Section], console: Any) -> None:
    """The same text in rich tables; nothing is cut off, and a console without colours gets no styles either."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    bold, styles = ("", {}) if console.no_color else ("bold", _STYLES)
    for section in sections:
        table = Table(
            box=box.SIMPLE_HEAD if section.header else None,
            show_edge=False,
            title=Text(section.title, style=bold),
            title_justify="left",
            title_style="",
            header_style=bold,
            show_header=bool(section.header),
            padding=(0, 2),
            collapse_padding=True,
        )
        for heading in section.header or section.rows[0]:
            table.add_column(Text(heading) if section.header else "", overflow="fold")
        for row in section.rows:
            table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
        console.print(table)
        console.print()


def _aligned(section: Section) -> list[str]:
    table = [section.header, *section.rows] if section.header else list(section.rows)
    cells = [[" ".join(cell.splitlines()) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]


def _terminal(stream: TextIO) -> Any:
    """A rich console where there is rich and the stream is a terminal; NO_COLOR and FORCE_COLOR are rich's to read."""
    try:
        from rich.console import Console
    except ImportError:
        return None
    console = Console(file=stream, highlight=False, markup=False, emoji=False)
    return console if console.is_terminal else None


def _write(text: str) -> None:
    """Print, whatever the stream's encoding can express."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "backslashreplace").decode(encoding))
