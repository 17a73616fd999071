"""The pytest plugin as a plugin's author runs it: by name, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MARKED = """
import pytest

@pytest.mark.musa
def test_on_a_device(): pass

@pytest.mark.emulated
@pytest.mark.slow
@pytest.mark.distributed
def test_anywhere(): pass
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers -p no:cacheprovider\n")
    command = [sys.executable, "-m", "pytest", "-p", "polyattn.testing.plugin", "-rsf", "-q", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POLYATTN_")}
    environment |= {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    (tmp_path / "test_marked.py").write_text(MARKED)
    return tmp_path


def test_absent_hardware_skips_with_detections_reason(marked: Path) -> None:
    done = run_pytest(marked)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed, 1 skipped" in done.stdout
    assert "platform musa" in done.stdout


def test_a_required_platform_that_is_absent_fails(marked: Path) -> None:
    done = run_pytest(marked, "--require-platform=musa")
    assert done.returncode == 1
    assert "--require-platform=musa: platform musa" in done.stdout


def test_the_kit_runs_on_the_backend_named(tmp_path: Path) -> None:
    kit = ("--pyargs", "polyattn.testing", "--polyattn-backend", "cpu:sdpa")
    done = run_pytest(tmp_path, *kit, "-k", "dense/plain or dense/out or every_claim")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "29 passed" in done.stdout


def test_random_calls_of_every_structure_are_right_on_the_cpu(tmp_path: Path) -> None:
    kit = ("--pyargs", "polyattn.testing", "--polyattn-backend", "cpu:sdpa", "--polyattn-backend", "cpu:blocked")
    done = run_pytest(tmp_path, *kit, "-k", "random")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 passed" in done.stdout


def test_a_backend_of_an_absent_platform_is_skipped_or_fails_when_required(tmp_path: Path) -> None:
    kit = ("--pyargs", "polyattn.testing", "--polyattn-backend", "musa:mudnn")
    done = run_pytest(tmp_path, *kit)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "platform musa" in done.stdout
    assert "passed" not in done.stdout
    assert run_pytest(tmp_path, *kit, "--require-platform=musa").returncode == 1


def test_requiring_a_platform_fails_even_where_no_backend_of_it_is_named(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--pyargs", "polyattn.testing", "--require-platform=musa", "-k", "musa")
    assert done.returncode == 1
    assert "passed" not in done.stdout


def test_a_misspelt_backend_is_a_usage_error(tmp_path: Path) -> None:
    done = run_pytest(tmp_path, "--pyargs", "polyattn.testing", "--polyattn-backend", "cpu:spda")
    assert done.returncode not in (0, 1)
    assert "cpu:sdpa" in done.stdout + done.stderr


def test_loading_the_plugin_imports_no_torch() -> None:
    code = "import sys, polyattn.testing.plugin, polyattn.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
