"""Docstrings as Markdown, for the site's reference: the house writes examples and tables that a terminal shows well.

A paragraph that starts with `>>>` becomes a block of code; a table (a name, two blanks or more, what it is) and what
stands under `Args:` become lists. Marks that Markdown would take for its own stay what they are, outside of backticks.
"""

from __future__ import annotations

import re
from typing import Any

try:
    import griffe
except ImportError:  # the conversion below is tested where the site's tools are not installed
    griffe = None  # type: ignore[assignment]

#: A row of a table: a name, two blanks or more, what it is. One of a section: a name, a colon, what it is.
_ROW = re.compile(r"(\S(?:.*?\S)?) {2,}(\S.*)")
_ARGUMENT = re.compile(r" {4}(\w[\w, ]*): (\S.*)")
_SECTION = re.compile(r"(Args|Returns|Raises|Yields):")


def as_markdown(text: str) -> str:
    """A docstring, its indentation taken away, as Markdown."""
    paragraphs = re.split(r"\n[ \t]*\n", text.strip("\n"))
    return "\n\n".join(_paragraph(paragraph.splitlines()) for paragraph in paragraphs)


def _paragraph(lines: list[str]) -> str:
    first = lines[0]
    if first.startswith(">>>"):
        return "\n".join(("```pycon", *lines, "```"))
    if first.startswith("    "):
        return "\n".join(lines)  # a block of code already
    if section := _SECTION.fullmatch(first):
        return f"**{section[1]}**\n\n{_listed(lines[1:], _ARGUMENT)}"
    if _ROW.fullmatch(first):
        return _listed(lines, _ROW)
    example = next((place for place, line in enumerate(lines) if line.startswith(">>>")), None)
    if example is not None:
        return f"{_paragraph(lines[:example])}\n\n{_paragraph(lines[example:])}"
    return "\n".join(map(_plain, lines))


def _listed(lines: list[str], pattern: re.Pattern[str]) -> str:
    """One item a row; a line that is none goes on with the row before."""
    items = []
    for line in lines:
        if row := pattern.fullmatch(line):
            names = ", ".join(f"`{name}`" for name in row[1].split(", "))
            items.append(f"- {names}: {_plain(row[2])}")
        else:
            items.append(f"  {_plain(line.strip())}")
    return "\n".join(items)


def _plain(line: str) -> str:
    """A line whose `<` and `*` mean themselves."""
    parts = re.split(r"(`[^`]*`)", line)
    return "".join(part if part.startswith("`") else part.replace("<", "&lt;").replace("*", r"\*") for part in parts)


if griffe is not None:

    class Docstrings(griffe.Extension):
        """What mkdocstrings loads: every docstring, as Markdown."""

        def on_instance(self, *, obj: Any, **_: Any) -> None:
            """After each module, class, function and attribute."""
            if obj.docstring is not None:
                obj.docstring.value = as_markdown(obj.docstring.value)
