"""Who is tested here: every vendor's package that is installed."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

#: What vendors' tests share asserts, too, and is no test file.
pytest.register_assert_rewrite("platforms.tests.on_device")

VENDORS = ("cuda", "rocm", "npu", "xpu", "musa")

collect_ignore = [f"{vendor}/tests" for vendor in VENDORS if find_spec(f"polyattn_{vendor}") is None]


@pytest.fixture(params=VENDORS)
def vendor(request: pytest.FixtureRequest) -> str:
    """One vendor after the other; skipped, and thereby told, where its package is not installed."""
    pytest.importorskip(f"polyattn_{request.param}")
    return str(request.param)
