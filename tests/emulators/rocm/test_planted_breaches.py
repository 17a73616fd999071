"""Each planted breach of the vendor's contract is caught: by a refusal of the op, by lint, or by the kit's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.emulators.kit import ROOT
from tests.emulators.rocm.planted import PLANTED, PREFIX
from tests.emulators.rocm.run_kit import ROOM
from tests.emulators.rocm.test_flash_attn_package import need_package

pytestmark = pytest.mark.emulated

WRONG = "off by more than"
#: Backend -> what is said of it in lint mode and outside of it.
BREACHES = {
    "unwritten_rows": ("finite", "finite"),
    "as_flash_attention": ("dropout", "dropout"),
    "long_boundaries": ("int32", "int32"),
    "shortest_as_minimum": ("finite", "finite"),
    "rows_first_lse": ("shape", "shape"),
    "no_scale": (WRONG, WRONG),
    "ck_softcap": ("does not read softcap", WRONG),
    "triton_window": ("does not read window_size", WRONG),
    "triton_lse": ("shape", "shape"),
}


@lru_cache
def found(on: str) -> dict[str, Any]:
    """What was wrong with the planted backends of one emulator."""
    if on != "aiter":
        need_package()
    names = [name for name, claims in PLANTED.items() if claims.on == on]
    entries = {f"cpu.{PREFIX}{name}": f"planted:{PREFIX}{name}" for name in names}
    command = [sys.executable, "-m", "tests.emulators.rocm.planted_worker", on]
    with TemporaryDirectory() as site:
        env = ROOM.environment_of(Path(site), entries, [on])
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", BREACHES)
def test_the_breach_is_caught(name: str) -> None:
    said = found(PLANTED[name].on)[name]
    for mode, words in zip(("lint", "bare"), BREACHES[name], strict=True):
        assert any(words in problem for problem in said[mode]), (mode, said[mode])


def test_the_contract_kept_passes() -> None:
    said = found("aiter")["honest"]
    assert said["lint"] == said["bare"] == []
    assert said["native"] >= 2


def test_every_planted_backend_has_its_row() -> None:
    assert {*BREACHES, "honest"} == set(PLANTED)
