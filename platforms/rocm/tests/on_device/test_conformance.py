"""The conformance kit over every backend of the device, as `pytest --pyargs polyattn.testing` runs it."""

from __future__ import annotations

import pytest

from polyattn.testing import run_conformance
from polyattn_rocm.backends import BACKENDS

pytestmark = [pytest.mark.rocm, pytest.mark.slow]


@pytest.mark.parametrize("backend", [backend.name for backend in BACKENDS])
def test_the_kit_is_green(backend: str) -> None:
    report = run_conformance(f"rocm:{backend}").as_dict()
    if report["skipped"]:
        pytest.skip(str(report["skipped"]))
    assert [f"{failure['case']}: {'; '.join(failure['problems'])}" for failure in report["failures"]] == []
