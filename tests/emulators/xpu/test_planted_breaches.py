"""Each planted breach of vllm_xpu_kernels' contract is caught: by a refusal, by lint, or by the kit's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.emulators.kit import PACKAGES, ROOT, has_package
from tests.emulators.xpu.planted import PLANTED, PREFIX
from tests.emulators.xpu.run_kit import ROOM

pytestmark = pytest.mark.emulated

#: Backend -> what is said of it.
BREACHES = {
    "empty_rows_kept": "NaN or infinite",
    "scale_of_zero": "off by more than",
    "fa2_order": "for argument",
    "wide_boundaries": "cu_seqlens_q must have dtype torch.int32",
    "lengths_without_pages": "cu_seqlens_k is needed",
    "longest_understated": "NaN or infinite",
    "scale_dropped": "off by more than",
    "one_document": "off by more than",
    "batch_as_it_is": "ragged format",
    "softcap_passed_on": "ignored by the native kernels",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if not has_package("vllm_xpu_kernels"):
        pytest.skip(f"pip install --no-deps --target FOLDER vllm-xpu-kernels==0.1.16.2, and {PACKAGES}=FOLDER")
    module = "tests.emulators.xpu.planted"
    entries = {f"cpu.{PREFIX}{name}": f"planted:{PREFIX}{name}" for name in PLANTED}
    command = [sys.executable, "-m", "tests.emulators.xpu.planted_worker", module, "tests.emulators.xpu.stack"]
    env = ROOM.environment_of(tmp_path_factory.mktemp("site"), entries)
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", BREACHES)
def test_the_breach_is_caught(found: dict[str, Any], name: str) -> None:
    problems, native = found[name]
    assert native + len(problems) > 0
    assert any(BREACHES[name] in problem for problem in problems), problems


def test_the_contract_kept_passes(found: dict[str, Any]) -> None:
    problems, native = found["honest"]
    assert problems == []
    assert native >= 2


def test_every_planted_backend_has_its_row() -> None:
    assert {"honest", *BREACHES} == set(PLANTED)
