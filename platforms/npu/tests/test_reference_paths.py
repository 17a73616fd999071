"""The README's table of what each path asks of the vendor's op is what the emulated device records now."""

from __future__ import annotations

import pytest

from platforms.npu.tests.recorded_paths import PATHS
from platforms.npu.tests.reference_table import table, written
from tests.emulators.npu.run_kit import has_package

pytestmark = pytest.mark.emulated


@pytest.mark.skipif(not has_package("mindiesd"), reason="mindiesd is not here (EMULATED_PACKAGES=FOLDER)")
def test_the_table_is_what_is_recorded_now() -> None:
    assert written() == table(), "python -m platforms.npu.tests.reference_table writes it anew"


def test_the_table_has_every_path() -> None:
    assert all(f"| {path.title} | `{path.backend}` |" in written() for path in PATHS)
