"""mkdocs' hook: what of the site is not written in docs/ by hand, and the directives that its pages may hold.

    <!-- include: platforms/cuda/README.md#Install -->   that section, whose links are turned to lead where they did
    <!-- code: examples/first_call.py -->                that file
    <!-- picture: NAME -->                               before a block of Python: its drawing (docs_pictures.py)
    <!-- performance -->                                 the tables of benchmarks/results (docs_performance.py)
    <!-- plot: RECORD -->                                the curves of one of them (docs_plots.py)

In the repository these are comments, which a reader of the Markdown does not see.
"""

from __future__ import annotations

import json
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # mkdocs loads this file by its path

VENDORS = ("cuda", "rocm", "npu", "xpu", "musa")
#: Page of the site -> file of the repository that it shows.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "benchmarks.md": "benchmarks/README.md",
    "toychip.md": "examples/polyattn-toychip/README.md",
    **{f"platforms/{vendor}.md": f"platforms/{vendor}/README.md" for vendor in VENDORS},
}
_SHOWN = {source: page for page, source in PAGES.items()}

_INCLUDE = re.compile(r"<!-- include: (\S+?)#(.+?) -->")
_CODE = re.compile(r"<!-- code: (\S+) -->")
_PICTURE = re.compile(r"<!-- picture: (\w+) -->\n(```python\n.*?^```$)", re.MULTILINE | re.DOTALL)
_PERFORMANCE = "<!-- performance -->"
_PLOT = re.compile(r"<!-- plot: (\w+) -->")
_FENCE_WORDS = re.compile(r"^```(python|pycon) .*$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")
_FENCED = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages that stand elsewhere, the pictures and the plots."""
    from mkdocs.structure.files import File

    from scripts.docs_pictures import pictures
    from scripts.docs_plots import drawn

    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for name, drawing in pictures((ROOT / "docs/concepts.md").read_text(encoding="utf-8")).items():
        files.append(File.generated(config, f"pictures/{name}.svg", content=drawing))
    for name in _PLOT.findall((ROOT / "docs/performance.md").read_text(encoding="utf-8")):
        record = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
        files.append(File.generated(config, f"plots/{name}.svg", content=drawn(record)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with its directives carried out."""
    return rendered(markdown, page.file.src_uri)


def rendered(markdown: str, page: str) -> str:
    """The Markdown of one page of the site."""
    here = PAGES.get(page, f"docs/{page}")
    text = relinked(markdown, here, page)
    text = _INCLUDE.sub(lambda found: relinked(section(found[1], found[2]), found[1], page), text)
    text = _CODE.sub(lambda found: listing(found[1]), text)
    text = _PICTURE.sub(lambda found: f"{found[2]}\n\n![{found[1]}](pictures/{found[1]}.svg)", text)
    text = _PLOT.sub(lambda found: f"![curves of {found[1]}](plots/{found[1]}.svg)", text)
    if _PERFORMANCE in text:
        from scripts.docs_performance import tables

        text = text.replace(_PERFORMANCE, tables(ROOT / "benchmarks/results"))
    return _FENCE_WORDS.sub(r"```\1", text)


def section(path: str, heading: str) -> str:
    """What stands under a heading of a file, up to the next heading as high; LookupError where it has none."""
    text = (ROOT / path).read_text(encoding="utf-8")
    fences = [found.span() for found in _FENCED.finditer(text)]
    heads = [
        found
        for found in re.finditer(r"^(#+) (.+)$", text, re.MULTILINE)
        if not any(start <= found.start() < end for start, end in fences)
    ]
    for place, head in enumerate(heads):
        if head[2].strip() == heading:
            later = (other.start() for other in heads[place + 1 :] if len(other[1]) <= len(head[1]))
            return text[head.end() : next(later, len(text))].strip()
    raise LookupError(f"{path} has no heading {heading!r}")


def listing(path: str) -> str:
    """A file as a block of code, under its name."""
    language = {".py": "python", ".toml": "toml"}[Path(path).suffix]
    return f'```{{.{language} title="{path}"}}\n{(ROOT / path).read_text(encoding="utf-8").rstrip()}\n```'


def relinked(markdown: str, here: str, page: str) -> str:
    """The links of a file of the repository, as they lead from a page of the site.

    To a file that the site does not show there is no link: its path is named instead. FileNotFoundError for a link
    to what is not there.
    """

    def turned(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if re.match(r"[a-z]+:|#", target):
            return found[0]
        path, mark, anchor = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(here), path))
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{here} links to {target}, which is not there")
        shown = _SHOWN.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
        if shown is None:
            return text if text.strip("`") == path else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(shown, posixpath.dirname(page) or '.')}{mark}{anchor})"

    parts = _FENCED.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(turned, part) for part in parts)
