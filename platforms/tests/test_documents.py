"""What the documents say of each vendor is what its package reads."""

from __future__ import annotations

import re
from pathlib import Path

from platforms.tests.vendors import detection_of

ROOT = Path(__file__).parents[2]


def row(document: Path, name: str) -> tuple[str, ...]:
    """The words in code of a table's row."""
    text = document.read_text(encoding="utf-8")
    (cells,) = re.findall(rf"^\| {re.escape(name)} \| (.*) \|$", text, re.M)
    return tuple(re.findall(r"`(\w+)`", cells))


def test_the_environments_page_names_the_variables_that_are_read(vendor: str) -> None:
    assert row(ROOT / "docs" / "environment.md", f"`{vendor}`") == detection_of(vendor).VARIABLES


def test_the_readme_names_what_hides_devices(vendor: str) -> None:
    assert row(ROOT / "platforms" / vendor / "README.md", "hides devices") == detection_of(vendor).VISIBILITY
