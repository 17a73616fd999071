"""Writes the table of docs/integrations.md: how far real diffusers models are from themselves once they use polyattn.

    python -m scripts.diffusers_table              # --print shows it and writes nothing

Each minor release of diffusers has a table of its own; the one that is installed is measured. Models are small and
random (`tests/integrations/diffusers_*_models.py`), in float32 on the CPU, with automatic choice and by our own blocked
kernel, whose arithmetic is another than torch's.
"""

from __future__ import annotations

import argparse
import re
import sys
import warnings
from pathlib import Path

import diffusers
import torch

import polyattn as pa
from tests.integrations.diffusers_cases import Case, both, difference
from tests.integrations.diffusers_image_models import IMAGE_MODELS
from tests.integrations.diffusers_video_models import VIDEO_MODELS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "integrations.md"
MINOR = ".".join(diffusers.__version__.split(".")[:2])
MODELS = (*IMAGE_MODELS, *VIDEO_MODELS)
BACKENDS = ("auto", "blocked")
HEAD = (
    "| model | padding | output, automatic | output, blocked | gradients, automatic | gradients, blocked |",
    "|---|---|---|---|---|---|",
)


def rows() -> list[tuple[Case, bool]]:
    """Every model, and once more with padding where it takes it."""
    return [(case, padded) for case in MODELS for padded in ((False, True) if case.padded else (False,))]


def label(case: Case, padded: bool) -> str:
    """The first cells of a row."""
    return f"| {case} | {'yes' if padded else 'no'} |"


def row(case: Case, padded: bool) -> str:
    """One line of the table, measured."""
    found = []
    for backend in BACKENDS:
        with pa.use_backend(backend):
            found.append(both(case, padded))
    outputs = [f"{difference(theirs.outputs, ours.outputs):.0e}" for theirs, ours in found]
    gradients = [f"{difference(theirs.gradients, ours.gradients):.0e}" for theirs, ours in found]
    return f"{label(case, padded)} {' | '.join((*outputs, *gradients))} |".replace("0e+00", "0")


def table() -> str:
    """The installed release's table."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' own, of names it will drop and of CPU autocast
        lines = [row(case, padded) for case, padded in rows()]
    return "\n".join((f"diffusers {diffusers.__version__}, torch {torch.__version__}:", "", *HEAD, *lines))


def markers(minor: str) -> tuple[str, str]:
    """What stands around the table of a minor release."""
    return f"<!-- diffusers {minor}: start -->", f"<!-- diffusers {minor}: end -->"


def written(minor: str) -> str:
    """The table that the page has."""
    start, end = map(re.escape, markers(minor))
    (text,) = re.findall(f"{start}\n(.*?)\n{end}", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(text).strip()


def main() -> int:
    """Write the table, or show it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", action="store_true", help="show the table and write nothing")
    if parser.parse_args().print:
        print(table())
        return 0
    text, (start, end) = PAGE.read_text(encoding="utf-8"), markers(MINOR)
    before, rest = text.split(start, 1)
    PAGE.write_text(f"{before}{start}\n{table()}\n{end}{rest.split(end, 1)[1]}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
