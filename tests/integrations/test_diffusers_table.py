"""docs/integrations.md has a row for every model that the tests run, and no number past what they ask for."""

from __future__ import annotations

import diffusers
import pytest

from scripts.diffusers_table import HEAD, MODELS, label, row, rows, written
from tests.integrations.diffusers_cases import TOLERANCE

MINORS = ("0.41", "0.42")


def numbers(line: str) -> list[float]:
    return [float(cell) for cell in line.strip("| ").split(" | ")[2:]]


@pytest.mark.parametrize("minor", MINORS)
def test_the_table_has_every_model_with_and_without_padding(minor: str) -> None:
    release, _, *lines = written(minor).splitlines()
    assert release.startswith(f"diffusers {minor}.")
    assert lines[:2] == list(HEAD)
    assert [line[: len(label(*each))] for line, each in zip(lines[2:], rows(), strict=True)] == [
        label(*each) for each in rows()
    ]
    assert all(0 <= number <= TOLERANCE for line in lines[2:] for number in numbers(line))


def test_the_installed_release_is_one_that_the_page_shows() -> None:
    assert diffusers.__version__.startswith(MINORS)


@pytest.mark.parametrize("case", [case for case in MODELS if case.cls == "Krea2Transformer2DModel"], ids=str)
def test_a_row_measured_anew_is_as_close(case: object) -> None:
    found = numbers(row(case, True))  # type: ignore[arg-type]
    assert len(found) == 4
    assert 0 < max(found) <= TOLERANCE
