"""The five vendor distributions look alike, and take from polyattn only what its door publishes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.packaging.distributions import ROOT, VENDORS

#: detection.py between these two comments is the same text in every vendor's package.
SHARED, OWN = "\n# The steps of detection.", "\n# This vendor's own answers."


def package(vendor: str) -> Path:
    return ROOT / "platforms" / vendor / "src" / f"polyattn_{vendor}"


def parts(vendor: str) -> tuple[str, str, str]:
    """A detection.py: what it states, the steps that all share, its own answers."""
    text = (package(vendor) / "detection.py").read_text(encoding="utf-8")
    assert (text.count(SHARED), text.count(OWN)) == (1, 1)
    stated, _, rest = text.partition(SHARED)
    steps, _, own = rest.partition(OWN)
    return stated, steps, own


def constants(text: str) -> list[str]:
    """The names that a text binds in upper case, in order."""
    return re.findall(r"^([A-Z][A-Z_]*) = ", text, re.M)


def functions(text: str) -> list[str]:
    return re.findall(r"^def (\w+)\(", text, re.M)


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_has_the_same_files(vendor: str) -> None:
    room = ROOT / "platforms" / vendor
    expected = [
        room / "pyproject.toml",
        room / "README.md",
        package(vendor) / "__init__.py",
        package(vendor) / "backends.py",
        package(vendor) / "detection.py",
        package(vendor) / "py.typed",
        room / "tests" / f"test_{vendor}_detection.py",
    ]
    assert [path for path in expected if not path.is_file()] == []


def test_detection_takes_the_same_steps_in_the_same_words() -> None:
    assert len({parts(vendor)[1] for vendor in VENDORS}) == 1
    steps = functions(parts(VENDORS[0])[1])
    assert {"probe", "machine", "capturing", "_count"} <= set(steps), "the comments stand around them"


def test_detection_states_and_answers_the_same_questions() -> None:
    stated, answered = (
        {tuple(find(parts(vendor)[part])) for vendor in VENDORS} for find, part in ((constants, 0), (functions, 2))
    )
    assert len(stated) == 1
    # After these a vendor may add what only its device needs.
    assert {names[:4] for names in answered} == {("_unserved", "_runtime", "_arch_and_name", "_build_facts")}


def exports_options(node: ast.stmt, vendor: str) -> bool:
    """A vendor's typed options are published beside its entry point; not every vendor has some."""
    if isinstance(node, ast.ImportFrom):
        return node.module == f"polyattn_{vendor}.options"
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"


def test_each_entry_point_reads_the_same_but_for_names_and_numbers() -> None:
    def outline(vendor: str) -> str:
        tree = ast.parse((package(vendor) / "__init__.py").read_text(encoding="utf-8"))
        tree.body = [node for node in tree.body if not exports_options(node, vendor)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant):
                node.value = "str" if node.value is None else type(node.value).__name__  # None: it has no such function
        return ast.unparse(tree).replace(f"polyattn_{vendor}", "polyattn_vendor")

    assert len({outline(vendor) for vendor in VENDORS}) == 1


def test_each_states_its_distribution_in_the_same_words() -> None:
    def outline(vendor: str) -> list[str]:
        text = (ROOT / "platforms" / vendor / "pyproject.toml").read_text(encoding="utf-8")
        return re.findall(r"^(?:\[.*\]|[a-z-]+ =)", text.replace(f"\n{vendor} =", "\nname-of-the-platform ="), re.M)

    assert len({tuple(outline(vendor)) for vendor in VENDORS}) == 1


def test_each_readme_answers_the_same_questions() -> None:
    def outline(vendor: str) -> list[str]:
        text = (ROOT / "platforms" / vendor / "README.md").read_text(encoding="utf-8")
        return re.findall(r"^(?:## .*|\| [a-z ]+ \|)", text, re.M)

    outlines = {tuple(outline(vendor)) for vendor in VENDORS}
    assert len(outlines) == 1
    assert "## Install" in outlines.pop()


def taken(text: str) -> Iterator[str]:
    """The modules that a source text takes something from: imports anywhere in it, and "module:function" texts."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports name the whole module"
            yield node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"^([\w.]+):\w+$", node.value)


def test_what_two_of_them_do_in_the_same_words_is_the_cores() -> None:
    """A function of some length that stands in two packages belongs behind the door."""
    holders: dict[str, set[str]] = {}
    for vendor in VENDORS:
        for path in package(vendor).rglob("*.py"):
            if path.name in ("detection.py", "backends.py", "__init__.py"):  # alike on purpose, as tested above
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef):
                    holders.setdefault(body_of(node), set()).add(f"{vendor}/{path.name}:{node.name}")
    assert [sorted(names) for body, names in holders.items() if len(names) > 1 and len(body) > 250] == []


def body_of(function: ast.FunctionDef) -> str:
    """What a function does, whatever it is called and its docstring says."""
    documented = ast.get_docstring(function) is not None
    return "\n".join(ast.unparse(statement) for statement in function.body[documented:])


@pytest.mark.parametrize("vendor", VENDORS)
def test_each_takes_from_polyattn_only_what_the_door_publishes(vendor: str) -> None:
    used = {module for path in package(vendor).rglob("*.py") for module in taken(path.read_text(encoding="utf-8"))}
    ours = {module for module in used if module.partition(".")[0].startswith("polyattn")}
    assert {module for module in ours if module.partition(".")[0] != f"polyattn_{vendor}"} == {"polyattn.vendor"}


@pytest.mark.parametrize(
    "text",
    [
        "import polyattn",
        "def f():\n    from polyattn.backends.generic import generic_backends",
        "from polyattn import attention",
        "SLOT = Slot('polyattn.backends.fused:sdpa')",
        "import polyattn_rocm.backends",
    ],
)
def test_a_way_around_the_door_is_seen(text: str) -> None:
    assert any(module.startswith("polyattn") for module in taken(text))
