"""Docstrings as Markdown, for the site's reference: the house writes examples and tables that a terminal shows well.

A paragraph that starts with `>>>` becomes a block of code, and a table (a name, two blanks or more, what it is) a list.
"""

from __future__ import annotations

import re
from typing import Any

try:
    import griffe
except ImportError:  # the conversion below is tested where the site's tools are not installed
    griffe = None  # type: ignore[assignment]

#: A row of a table: a name, two blanks or more, what it is.
_ROW = re.compile(r"(\S(?:.*?\S)?) {2,}(\S.*)")


def as_markdown(text: str) -> str:
    """Examples fenced, tables of names as lists, anything else as it is."""
    paragraphs = re.split(r"\n[ \t]*\n", text.strip("\n"))
    return "\n\n".join(_paragraph(paragraph) for paragraph in paragraphs)


def _paragraph(paragraph: str) -> str:
    lines = paragraph.splitlines()
    if lines[0].startswith(">>>"):
        return "\n".join(("```pycon", *lines, "```"))
    if lines[0].startswith("    "):
        return paragraph  # a block of code already
    if not _ROW.fullmatch(lines[0]):
        start = next((place for place, line in enumerate(lines) if line.startswith(">>>")), None)
        return (
            paragraph
            if start is None
            else "\n\n".join(("\n".join(lines[:start]), _paragraph("\n".join(lines[start:]))))
        )
    items: list[str] = []
    for line in lines:
        row = _ROW.fullmatch(line)
        if row and not line.startswith(" "):
            items.append(f"- {', '.join(f'`{name}`' for name in row[1].split(', '))}: {row[2]}")
        else:
            items.append(f"  {line.strip()}")  # the row before goes on
    return "\n".join(items)


if griffe is not None:

    class Docstrings(griffe.Extension):
        """What mkdocstrings loads: every docstring, as Markdown."""

        def on_instance(self, *, obj: Any, **_: Any) -> None:
            """After each module, class, function and attribute."""
            if obj.docstring is not None:
                obj.docstring.value = as_markdown(obj.docstring.value)
