"""The blocks of Python in our Markdown: which there are, what each needs, and what can be asked of its text.

The words after ```python say what a block needs; without one, it runs wherever torch does.

    device=cuda     a device of that platform; elsewhere its text is checked, not run
    ranks=2         so many processes, as torchrun starts them
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Every page that a reader of the repository or of the site sees.
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "platforms/*/README.md", "examples/*/README.md", "benchmarks/README.md")
    for path in ROOT.glob(pattern)
)
_FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_KNOWN = ("device", "ranks")
_OURS = ("polyattn", "pa")


@dataclass(frozen=True)
class Snippet:
    """A block: where it stands, its text, and what it needs."""

    page: Path
    line: int
    text: str
    device: str = ""
    ranks: int = 1

    @property
    def place(self) -> str:
        """As an editor takes it."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def tree(self) -> ast.Module:
        """Its syntax."""
        return ast.parse(self.text, self.place)


def fences(page: Path) -> Iterator[tuple[int, str, str]]:
    """(line, words after the fence, text) of every block of a page."""
    source = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(source):
        text = re.sub(f"^{found['indent']}", "", found["text"], flags=re.MULTILINE)
        yield source.count("\n", 0, found.start()) + 2, found["info"].strip(), text


def snippets(page: Path) -> list[Snippet]:
    """The blocks of Python; ValueError for one that asks for what is not known."""
    made = []
    for line, info, text in fences(page):
        language, *words = info.split() or [""]
        if language != "python":
            continue
        needs = dict(word.partition("=")[::2] for word in words)
        if unknown := set(needs) - set(_KNOWN):
            raise ValueError(f"{page}:{line}: a block may ask for {_KNOWN}, not {sorted(unknown)}")
        made.append(Snippet(page, line, text, needs.get("device", ""), int(needs.get("ranks", 1))))
    return made


def absent(snippet: Snippet) -> list[str]:
    """Packages that it imports and that are not here."""
    roots = {name.partition(".")[0] for name, _ in _imported(snippet.tree)}
    return sorted(root for root in roots if importlib.util.find_spec(root) is None)


def name_problems(snippet: Snippet) -> list[str]:
    """Names of polyattn that the text uses and that are not there, and arguments that they do not take."""
    found = []
    names: dict[str, Any] = {"pa": importlib.import_module("polyattn"), "polyattn": importlib.import_module("polyattn")}
    for module, name in _imported(snippet.tree):
        if module.partition(".")[0].startswith("polyattn") and name and importlib.util.find_spec(module):
            if not hasattr(importlib.import_module(module), name):
                found.append(f"{snippet.place}: {module} has no {name}")
            else:
                names[name] = getattr(importlib.import_module(module), name)
    for node in ast.walk(snippet.tree):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)) and dotted[0] in _OURS:
            found += [f"{snippet.place}: no {'.'.join(dotted)}"] if _resolved(names, dotted) is _ABSENT else []
        if isinstance(node, ast.Call) and (dotted := _dotted(node.func)) and dotted[0] in names:
            found += [f"{snippet.place}: {problem}" for problem in _argument_problems(names, dotted, node)]
    return found


_ABSENT = object()


def _argument_problems(names: dict[str, Any], dotted: tuple[str, ...], call: ast.Call) -> list[str]:
    target = _resolved(names, dotted)
    if target is _ABSENT or not callable(target):
        return []
    taken = inspect.signature(target).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return []
    return [f"{'.'.join(dotted)} takes no {key.arg}" for key in call.keywords if key.arg and key.arg not in taken]


def _resolved(names: dict[str, Any], dotted: tuple[str, ...]) -> Any:
    value = names.get(dotted[0], _ABSENT)
    for part in dotted[1:]:
        value = getattr(value, part, _ABSENT)
    return value


def _dotted(node: ast.AST) -> tuple[str, ...]:
    """("pa", "Packed", "from_lengths") of such an expression; empty for any other."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return (*before, node.attr)
    return ()


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of each import; no name where the module itself is imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
