"""The five vendor distributions look alike: reading one is reading all."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.packaging.distributions import ROOT, VENDORS

#: What every vendor's detection.py offers and is built of, in this order. Each may add what only its device needs.
DETECTION = (
    "VISIBILITY",
    "VARIABLES",
    "DISTRIBUTIONS",
    "DRIVER_FILES",
    "probe",
    "machine",
    "capturing",
    "_unserved",
    "_runtime",
    "_count",
    "_driver",
    "_hidden",
    "_installed",
    "_arch_and_name",
)


def top_level(path: Path) -> list[str]:
    """Names bound at the top of a module, in order."""
    bound = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            bound.append(node.name)
        elif isinstance(node, ast.Assign):
            bound += [target.id for target in node.targets if isinstance(target, ast.Name)]
    return bound


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_has_the_same_files(vendor: str) -> None:
    room = ROOT / "platforms" / vendor
    package = room / "src" / f"polyattn_{vendor}"
    expected = [
        room / "pyproject.toml",
        room / "README.md",
        package / "__init__.py",
        package / "backends.py",
        package / "detection.py",
        package / "py.typed",
        room / "tests" / f"test_{vendor}_backends.py",
        room / "tests" / f"test_{vendor}_detection.py",
    ]
    assert [path for path in expected if not path.is_file()] == []


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_detects_by_the_same_steps(vendor: str) -> None:
    bound = top_level(ROOT / "platforms" / vendor / "src" / f"polyattn_{vendor}" / "detection.py")
    assert [name for name in bound if name in DETECTION] == list(DETECTION)


def test_each_states_its_distribution_in_the_same_words() -> None:
    def outline(vendor: str) -> list[str]:
        text = (ROOT / "platforms" / vendor / "pyproject.toml").read_text(encoding="utf-8")
        return re.findall(r"^(?:\[.*\]|[a-z-]+ =)", text.replace(f"\n{vendor} =", "\nname-of-the-platform ="), re.M)

    assert len({tuple(outline(vendor)) for vendor in VENDORS}) == 1
