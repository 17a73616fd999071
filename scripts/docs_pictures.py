"""Draws who attends to whom, as SVG, from the float64 reference: values that are one-hot by key come out as weights.

    python -m scripts.docs_pictures docs/concepts.md build/pictures

A line `<!-- picture: NAME -->` before a block of Python says that the block is drawn: it sets `structure`, `queries`,
`keys` and, where the call says more, `rule`. So the code that a reader sees is the code that is drawn.
"""

from __future__ import annotations

import re
import sys
from itertools import product
from pathlib import Path
from typing import Any

import torch

import polyattn as pa

_BLOCK = re.compile(r"^(?:<!-- picture: (\w+) -->\n)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Points: one pair's square, half as wide where keys are many; the space between two samples; the margin for words.
_CELL, _MANY, _GAP, _MARGIN = 16, 16, 28, 26
_SEEN, _HIDDEN, _LINE, _TEXT = "#3f51b5", "#eceff1", "#ffffff", "#78909c"


def pictures(page: str) -> dict[str, str]:
    """Name -> SVG, of every marked block of a page of Markdown; its blocks run in order and share their names."""
    names: dict[str, Any] = {}
    drawn = {}
    for picture, code in _BLOCK.findall(page):
        names.pop("rule", None)
        exec(compile(code, f"the block of {picture or 'the page'}", "exec"), names)
        if picture:
            seen = visibility(names["structure"], names["queries"], names["keys"], **names.get("rule", {}))
            drawn[picture] = svg(seen, picture)
    return drawn


def visibility(structure: pa.structures.Structure, queries: int, keys: int, **rule: Any) -> torch.Tensor:
    """Bool [samples, queries, keys]: whether the key has a weight in the query's answer, by the reference."""
    generator = torch.Generator().manual_seed(0)
    samples = _samples(structure)
    packed, paged = isinstance(structure, pa.Packed), isinstance(structure, pa.Paged)
    rows = () if packed else (samples,)
    q = torch.randn(*rows, queries, 1, 16, generator=generator, dtype=torch.float64)
    k = torch.randn(*rows, keys, 1, 16, generator=generator, dtype=torch.float64)
    v = torch.eye(keys, dtype=torch.float64).unsqueeze(1).expand(*rows, keys, 1, keys)
    if paged:  # the pool's slots are the keys
        pages = int(structure.block_table.max()) + 1
        k, v = (t[0].unflatten(0, (pages, keys // pages)) for t in (k, v))
    weights = pa.reference_attention(q, k, v, structure=structure, **rule).squeeze(-2)
    return weights.reshape(-1 if paged else samples, queries, keys) > 0.0


def svg(seen: torch.Tensor, title: str) -> str:
    """The squares of each sample, side by side."""
    samples, queries, keys = seen.shape
    cell = _CELL if keys <= _MANY else _CELL // 2
    wide, high = keys * cell, queries * cell
    width, height = _MARGIN + samples * wide + (samples - 1) * _GAP + 2, _MARGIN + high + 2
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"',
        f'  font-family="sans-serif" font-size="11" fill="{_TEXT}"><title>{title.replace("_", " ")}</title>',
        f'<text transform="translate(12 {_MARGIN + high / 2}) rotate(-90)" text-anchor="middle">query</text>',
    ]
    for sample in range(samples):
        left = _MARGIN + sample * (wide + _GAP)
        of = f" of sample {sample}" if samples > 1 else ""
        parts.append(f'<text x="{left + wide / 2}" y="14" text-anchor="middle">key{of}</text>')
        for query, key in product(range(queries), range(keys)):
            fill = _SEEN if seen[sample, query, key] else _HIDDEN
            place = f'x="{left + key * cell}" y="{_MARGIN - 6 + query * cell}" width="{cell}" height="{cell}"'
            parts.append(f'<rect {place} fill="{fill}" stroke="{_LINE}"/>')
    return "\n".join([*parts, "</svg>", ""])


def _samples(structure: pa.structures.Structure) -> int:
    if isinstance(structure, pa.KeyPadding):
        return structure.keep.shape[0]
    if isinstance(structure, pa.Spans):
        return len(structure.full)
    return structure.block_table.shape[0] if isinstance(structure, pa.Paged) else 1


def main() -> int:
    """The command line: a page, and the folder that the pictures go to."""
    if len(sys.argv) != 3:
        print("usage: python -m scripts.docs_pictures PAGE FOLDER", file=sys.stderr)
        return 2
    folder = Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name, drawing in pictures(Path(sys.argv[1]).read_text(encoding="utf-8")).items():
        (folder / f"{name}.svg").write_text(drawing, encoding="utf-8")
        print(folder / f"{name}.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
