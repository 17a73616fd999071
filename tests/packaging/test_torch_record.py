"""The record that `make test-torch` leaves: what ran, and why the rest did not."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from scripts.torch_record import write_record

TESTS = """
import pytest

def test_passes(): pass
def test_fails(): assert False
@pytest.fixture
def broken(): raise OSError
def test_breaks(broken): pass
@pytest.mark.parametrize("number", range(3))
def test_is_skipped(number): pytest.skip("no CUDA here")
@pytest.mark.skipif(True, reason="needs torch 2.7")
def test_is_skipped_too(): pass
@pytest.mark.xfail(reason="torch 2.6 breaks the graph")
def test_is_expected_to_fail(): assert False
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("record")
    (folder / "test_all.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml=report.xml", "-c", "/dev/null", "--rootdir=."]
    subprocess.run([*command, "test_all.py"], cwd=folder, capture_output=True, check=False)
    told = write_record(folder / "docs" / "record.json", folder / "report.xml", sys.executable, ["tests/unit"])
    assert told.endswith("1 passed, 2 failed, 5 skipped")
    return dict(json.loads((folder / "docs" / "record.json").read_text()))


def test_outcomes_are_counted(record: dict[str, object]) -> None:
    assert [record[name] for name in ("passed", "failed", "skipped", "tests")] == [1, 2, 5, ["tests/unit"]]


def test_every_skip_has_its_reason(record: dict[str, object]) -> None:
    assert record["skipped_because"] == {"no CUDA here": 3, "needs torch 2.7": 1, "torch 2.6 breaks the graph": 1}
