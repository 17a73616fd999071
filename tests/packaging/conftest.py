"""The wheels of this checkout, built once for all tests of this room."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.packaging.distributions import ROOT, VENDORS, build


@pytest.fixture(scope="session")
def projects() -> dict[str, Path]:
    """Import name -> folder of its pyproject.toml."""
    return {"polyattn": ROOT, **{f"polyattn_{vendor}": ROOT / "platforms" / vendor for vendor in VENDORS}}


@pytest.fixture(scope="session")
def wheels(projects: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Import name -> its wheel; all six in one folder."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in projects.values():
        build(project, "wheel", folder)
    built = {path.name.partition("-")[0]: path for path in folder.iterdir()}
    assert set(built) == set(projects)
    return built
