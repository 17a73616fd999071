"""What may be warned of on a device: generic routes say that they are slow, and the makers' compilers say more."""

from __future__ import annotations

from pathlib import Path

import pytest

ALLOWED = ("ignore::polyattn.PolyattnWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """For the tests of this folder alone."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for allowed in ALLOWED:
                item.add_marker(pytest.mark.filterwarnings(allowed))
