"""The README's table of what each path asks of the vendor's op is what the emulated device records now."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from platforms.npu.tests.recorded_paths import PATHS
from platforms.npu.tests.reference_table import table, written

pytestmark = pytest.mark.emulated


def _has_mindiesd() -> bool:
    folders = filter(None, os.environ.get("EMULATED_PACKAGES", "").split(os.pathsep))
    return importlib.util.find_spec("mindiesd") is not None or any(Path(one, "mindiesd").is_dir() for one in folders)


@pytest.mark.skipif(not _has_mindiesd(), reason="mindiesd is not here (EMULATED_PACKAGES=FOLDER names where it is)")
def test_the_table_is_what_is_recorded_now() -> None:
    assert written() == table(), "python -m platforms.npu.tests.reference_table writes it anew"


def test_the_table_has_every_path() -> None:
    assert all(f"| {path.title} | `{path.backend}` |" in written() for path in PATHS)
