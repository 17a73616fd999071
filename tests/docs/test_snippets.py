"""Every block of Python in README, docs, platforms and examples runs, and prints what the page says that it prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import polyattn as pa
from tests.docs.snippets import PAGES, ROOT, Snippet, absent, fences, name_problems, snippets

WITH_PYTHON = [page for page in PAGES if snippets(page)]
#: Those of which a block asks for no device and one process; toychip's README runs where toychip is installed.
RUNNABLE = [page for page in WITH_PYTHON if any(not s.device and s.ranks == 1 for s in snippets(page))]
SPREAD = [snippet for page in PAGES for snippet in snippets(page) if snippet.ranks > 1]


def label(value: Path | Snippet) -> str:
    return value.place if isinstance(value, Snippet) else value.relative_to(ROOT).as_posix()


def runs_here(snippet: Snippet) -> bool:
    """Whether this process can run it; several ranks are another test's."""
    accepted = {report.name for report in pa.platforms() if report.status == "accepted"}
    return snippet.ranks == 1 and snippet.device in ("", *accepted) and not absent(snippet)


def test_the_pages_are_those_of_the_site_and_of_every_platform() -> None:
    shown = {label(page) for page in WITH_PYTHON}
    assert {"README.md", "docs/concepts.md", "docs/migration.md", "docs/quickstart.md", "docs/routing.md"} <= shown
    assert {f"platforms/{vendor}/README.md" for vendor in ("cuda", "rocm", "npu", "xpu", "musa")} <= set(
        map(label, PAGES)
    )


@pytest.mark.parametrize("page", RUNNABLE, ids=label)
def test_a_pages_blocks_run_one_after_another(
    page: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where dataclasses look for what they are made in
    ran = 0
    for snippet in snippets(page):
        if runs_here(snippet):
            exec(compile("\n" * (snippet.line - 1) + snippet.text, label(page), "exec"), vars(module))
            ran += 1
    printed = capsys.readouterr().out
    for line in told(page):
        assert line in printed
    if not ran:
        pytest.skip("its blocks import packages that are not here; their texts are checked, in another test")


def told(page: Path) -> list[str]:
    """The lines that `<!-- output -->` says are printed; a machine's own line is its own."""
    found = re.findall(r"<!-- output -->\n```\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line for text in found for line in text.splitlines() if not line.startswith("machine ")]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("snippet", SPREAD, ids=label)
def test_a_block_for_several_ranks_runs_on_them(snippet: Snippet, tmp_path: Path) -> None:
    script = tmp_path / "snippet.py"
    script.write_text(snippet.text, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={snippet.ranks}"]
    done = subprocess.run([*command, str(script)], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.mark.parametrize("page", WITH_PYTHON, ids=label)
def test_every_block_is_python_and_uses_names_and_arguments_that_there_are(page: Path) -> None:
    """Also of the blocks that need a vendor's device, which nothing here can run."""
    assert [problem for snippet in snippets(page) for problem in name_problems(snippet)] == []


@pytest.mark.parametrize("page", PAGES, ids=label)
def test_names_in_the_running_text_are_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for _, _, block in fences(page):
        text = text.replace(block, "")
    gone = []
    for dotted in re.findall(r"`pa\.([A-Za-z_][\w.]*\w)", text):
        value: Any = pa
        for part in dotted.split("."):
            value = getattr(value, part, None)
        gone += [dotted] if value is None else []
    assert gone == []


def test_a_name_and_an_argument_that_are_not_there_are_found() -> None:
    text = """
import polyattn as pa
from polyattn.vendor import Backend, Nothing
pa.Packed.from_lenghts([1])
pa.attention(q, k, v, mask=None)
Backend(name="a", forwards=())
"""
    problems = name_problems(Snippet(ROOT / "README.md", 1, text, device="cuda"))
    assert len(problems) == 4
    for word in ("Nothing", "from_lenghts", "attention takes no mask", "Backend takes no forwards"):
        assert any(word in problem for problem in problems)


def test_a_block_that_asks_for_what_is_not_known_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python gpu=1\npass\n```\n", encoding="utf-8")
    with pytest.raises(ValueError, match="gpu"):
        snippets(page)
