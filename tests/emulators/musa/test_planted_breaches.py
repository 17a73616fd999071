"""Each planted breach of mate's contract is caught: by a refusal, by lint, or by the kit's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.emulators.kit import ROOT
from tests.emulators.musa.planted import PLANTED, PREFIX
from tests.emulators.musa.run_kit import ROOM

pytestmark = pytest.mark.emulated

#: Backend -> what is said of it.
BREACHES = {
    "window_for_causal": "window_size_right",
    "tuple_kept": "raised",
    "dropout_passed": "unexpected keyword argument 'dropout_p'",
    "scale_of_zero": "NaN or infinite",
    "wide_boundaries": "must be int32",
    "longest_understated": "NaN or infinite",
    "no_longest": "max_seqlen_q is needed",
    "neighbours_trusted": "NaN or infinite",
}
#: Right on the CPU; the second leaves its boundaries there, which test_devices.py of XPU's emulators catches.
HONEST = ("honest", "left_on_cpu", "honest_documents")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    module = "tests.emulators.musa.planted"
    entries = {f"cpu.{PREFIX}{name}": f"planted:{PREFIX}{name}" for name in PLANTED}
    command = [sys.executable, "-m", "tests.emulators.xpu.planted_worker", module, "tests.emulators.musa.stack"]
    env = ROOM.environment_of(tmp_path_factory.mktemp("site"), entries)
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", BREACHES)
def test_the_breach_is_caught(found: dict[str, Any], name: str) -> None:
    problems, _ = found[name]
    assert any(BREACHES[name] in problem for problem in problems), problems


@pytest.mark.parametrize("name", HONEST)
def test_the_contract_kept_passes(found: dict[str, Any], name: str) -> None:
    problems, native = found[name]
    assert problems == []
    assert native > 0


def test_every_planted_backend_has_its_row() -> None:
    assert {*HONEST, *BREACHES} == set(PLANTED)
