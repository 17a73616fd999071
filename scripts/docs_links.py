"""Checks a built site without a network: internal links, anchors, pictures and scripts are there, none comes from afar.

python -m scripts.docs_links build/docs
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

#: What a browser fetches by itself, by tag and attribute; a link `a` is only followed by its reader.
_FETCHED = {("img", "src"), ("script", "src"), ("link", "href"), ("source", "src"), ("iframe", "src")}
#: `link` says where a page may be found too, which fetches nothing.
_NOT_FETCHED = {"canonical", "prev", "next", "alternate", "edit"}


@dataclass
class Page(HTMLParser):
    """What a page links to, what it fetches, and the anchors it has."""

    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)
    anchors: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Called by the parser for each tag."""
        given = {name: value for name, value in attrs if value is not None}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag == "link" and given.get("rel") in _NOT_FETCHED:
            return
        self.fetched += [value for name, value in given.items() if (tag, name) in _FETCHED]


def problems(site: Path) -> list[str]:
    """What is wrong, a line each; none is a site whose links all lead somewhere."""
    found = []
    for path in sorted(site.rglob("*.html")):
        page, here = read(path), path.relative_to(site)
        found += [f"{here}: {target} is loaded from elsewhere" for target in page.fetched if _far(target)]
        for target in (*page.links, *page.fetched):
            if not _far(target) and (wrong := _wrong(site, path, target)):
                found.append(f"{here}: {target} {wrong}")
    return found


@cache
def read(path: Path) -> Page:
    """A page, parsed once."""
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


def _far(target: str) -> bool:
    return bool(re.match(r"[a-z][a-z0-9+.-]*:|//", target))


def _wrong(site: Path, path: Path, target: str) -> str:
    """Why a target within the site cannot be reached; empty where it can."""
    parts = urlsplit(target)
    there = path
    if parts.path:
        start = site if parts.path.startswith("/") else path.parent
        there = (start / unquote(parts.path).lstrip("/")).resolve()
    if there.is_dir():
        there /= "index.html"
    if not there.exists():
        return "is not there"
    if parts.fragment and there.suffix == ".html" and unquote(parts.fragment) not in read(there).anchors:
        return "has no such anchor"
    return ""


def main() -> int:
    """The command line; 1 where something is wrong."""
    if len(sys.argv) != 2 or not Path(sys.argv[1], "index.html").exists():
        print("usage: python -m scripts.docs_links FOLDER-OF-A-BUILT-SITE", file=sys.stderr)
        return 2
    site = Path(sys.argv[1]).resolve()
    found = problems(site)
    pages = len(list(site.rglob("*.html")))
    print("\n".join([*found, f"{pages} pages, {len(found)} broken links"]))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
