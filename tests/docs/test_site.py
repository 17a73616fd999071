"""What the site shows and nobody writes by hand: pictures, measurements, READMEs, docstrings; and its links."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import polyattn as pa
from scripts import docs_links, docs_performance, docs_pictures, docs_plots, docs_site
from scripts.docs_docstrings import as_markdown

ROOT = Path(__file__).parents[2]
CONCEPTS = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")


def test_every_structure_has_a_picture() -> None:
    drawn = docs_pictures.pictures(CONCEPTS)
    kinds = {"dense", "key_padding", "mask", "packed", "spans", "paged", "video_tiles", "block_map"}
    assert kinds <= set(drawn)
    assert all(text.startswith("<svg ") and text.count("<rect ") >= 16 for text in drawn.values())


@pytest.mark.parametrize(
    ("structure", "queries", "keys", "rule", "wanted"),
    [
        (pa.Dense(), 2, 3, {"causal": True}, ["##.", "###"]),
        (pa.KeyPadding.from_lengths([3, 1], 3), 3, 3, {}, ["###", "###", "###", "#..", "...", "..."]),
        (pa.Packed.from_lengths([2, 1]), 3, 3, {}, ["##.", "##.", "..#"]),
        (pa.Packed.real_and_pad(2, 3), 3, 3, {}, ["##.", "##.", "..."]),
        (pa.Spans([[(1, 3)]]), 4, 4, {}, ["#...", "###.", "###.", "####"]),
        (pa.Paged([[1, 0]], [3]), 1, 4, {}, ["#.##"]),
        (pa.BlockMap.from_mask(torch.eye(2), 1, 2), 2, 4, {}, ["##..", "..##"]),
    ],
)
def test_a_picture_shows_what_the_structure_means(structure, queries, keys, rule, wanted) -> None:
    seen = docs_pictures.visibility(structure, queries, keys, **rule)
    assert ["".join("#" if key else "." for key in row) for row in seen.flatten(0, 1).tolist()] == wanted


def test_every_committed_measurement_is_in_the_tables_and_no_other() -> None:
    shown = docs_performance.tables(ROOT / "benchmarks" / "results")
    records = {path: json.loads(path.read_text()) for path in (ROOT / "benchmarks" / "results").glob("*.json")}
    measured = {path: record for path, record in records.items() if record.get("targets") or record.get("comparisons")}
    assert len(measured) > 10
    for path, record in measured.items():
        assert f"`benchmarks/results/{path.name}`" in shown
        for name, target in record.get("targets", {}).items():
            verdict = "met" if target["met"] else "**missed**"
            assert re.search(rf"\| {re.escape(name)} \| \S+ \| .* \| {re.escape(verdict)} \|", shown)
    assert set(re.findall(r"`benchmarks/results/(.*)`", shown)) == {path.name for path in measured}


def test_a_missed_target_says_so(tmp_path: Path) -> None:
    machine = {"device": "Toy One", "date": "2026-01-01", "python": "3.11", "versions": {"torch": "2.13.0"}}
    targets = {"ours / theirs": {"value": 1.25, "at_most": 1.1, "met": False}}
    comparisons = {"a shape": {"milliseconds": {"ours": 5.0, "theirs": 4.0}, "base": "theirs", "route": "toy:rows"}}
    record = {"question": "toys", "machine": machine, "targets": targets, "comparisons": comparisons}
    (tmp_path / "toys.json").write_text(json.dumps(record))
    shown = docs_performance.tables(tmp_path)
    assert "## Toy One" in shown
    assert "| ours / theirs | 1.25 | at most 1.1 | **missed** |" in shown
    assert "| ours | 5 |" in shown


def test_a_readme_is_shown_with_its_links_turned() -> None:
    shown = docs_site.rendered((ROOT / "README.md").read_text(encoding="utf-8"), "index.md")
    assert "(platforms/cuda.md)" in shown
    assert "(architecture.md)" in shown
    assert "](docs/" not in shown
    assert "(../platforms/cuda.md)" in docs_site.relinked(
        "[x](../../platforms/cuda/README.md)", "docs/reference/calls.md", "reference/calls.md"
    )


def test_a_link_to_what_is_not_there_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        docs_site.relinked("[x](nowhere.md)", "README.md", "index.md")
    assert docs_site.relinked("```\n[x](nowhere.md)\n```", "README.md", "index.md") == "```\n[x](nowhere.md)\n```"


def test_the_quick_start_has_each_vendors_own_words() -> None:
    shown = docs_site.rendered((ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8"), "quickstart.md")
    for vendor in docs_site.VENDORS:
        assert f'pip install "polyattn[{vendor}]"' in shown
    assert "<!-- include" not in shown
    with pytest.raises(LookupError, match="no heading"):
        docs_site.section("README.md", "No such heading")


def test_every_public_name_is_in_the_reference() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: polyattn\.([\w.]+)", pages, re.MULTILINE))
    rooms = {"structures", "integrations"}  # shown name by name, or module by module
    assert set(pa.__all__) - shown == rooms


def test_docstrings_become_markdown() -> None:
    text = "Adds <a> to *b*, `*`.\n\na, b   the first\n       goes on\n\nArgs:\n    c: the third\n\n>>> 1 + 1\n2"
    assert as_markdown(text) == (
        "Adds &lt;a> to \\*b\\*, `*`.\n\n- `a`, `b`: the first\n  goes on\n\n**Args**\n\n- `c`: the third\n\n"
        "```pycon\n>>> 1 + 1\n2\n```"
    )


def test_the_link_checker_finds_what_is_broken(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="a/#here">x</a><a href="a/#gone">x</a><a href="b/">x</a><img src="no.svg">'
        '<a href="https://elsewhere.example/">x</a><script src="https://elsewhere.example/x.js"></script>'
    )
    (tmp_path / "a" / "index.html").write_text('<h1 id="here">x</h1><a href="../">x</a><a href="#here">x</a>')
    docs_links.read.cache_clear()
    assert docs_links.problems(tmp_path) == [
        "index.html: https://elsewhere.example/x.js is loaded from elsewhere",
        "index.html: a/#gone has no such anchor",
        "index.html: b/ is not there",
        "index.html: no.svg is not there",
    ]


def test_a_curve_is_drawn_with_the_limit_beside_it() -> None:
    record = json.loads((ROOT / "benchmarks" / "results" / "video_h200.json").read_text())
    drawn = docs_plots.drawn(record)
    assert drawn.count("<svg ") == 1
    for word in ("dense FA3 by the share kept", "720p, tiles of 64", "720p, tiles of 256", record["machine"]["device"]):
        assert f"<!-- {word}" in drawn or word in drawn
    with pytest.raises(LookupError, match="no curve"):
        docs_plots.drawn({**record, "comparisons": {"a shape": {}}})
