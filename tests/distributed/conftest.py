"""The pool of ranks: one for all tests of this folder, which therefore stay on one of pytest-xdist's workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """`pool.run(world, "module:function", *args)`: each rank's result of `function(group, *args)`."""
    ranks = Pool()
    yield ranks
    ranks.close()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Called with the items of all folders."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.distributed)
            if config.pluginmanager.hasplugin("xdist"):  # whose marker it is
                item.add_marker(pytest.mark.xdist_group("distributed"))
