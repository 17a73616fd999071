"""Each planted breach of the vendor's contract is caught: by a refusal of the op, by lint, or by the kit's numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.emulators.npu.planted import PLANTED
from tests.emulators.npu.run_kit import ROOT, environment

pytestmark = pytest.mark.emulated

WRONG = "off by more than"
#: Backend -> what is said of it in lint mode and outside of it.
BREACHES = {
    "flipped_mask": (WRONG, WRONG),
    "mask_of_keys": ("is not broadcast", "error code is 561103"),
    "float_mask": ("not bool or uint8", "error code is 161002"),
    "empty_rows_kept": (WRONG, WRONG),
    "no_scale": (WRONG, WRONG),
    "fia_no_scale": (WRONG, WRONG),
    "fia_no_heads": ("num_heads 1 and a query of", "num_heads 1 and a query of"),
    "causal_without_mask": ("ignored: full attention", WRONG),
    "causal_with_its_own_mask": ("takes an atten_mask of 2048x2048", "takes an atten_mask of 2048x2048"),
    "causal_with_a_wrong_mask": ("that is not triu(1)", "that is not triu(1)"),
    "top_left": (WRONG, WRONG),
    "device_boundaries": ("for argument 'actual_seq_qlen'", "for argument 'actual_seq_qlen'"),
    "without_the_last_total": ("finite", "finite"),
    "lengths_for_ends": ("finite", "finite"),
    "fia_leading_zero": ("is not T", "is not T"),
    "varlen_without_zero": (WRONG, WRONG),
    "laser_outliers": ("an unscaled score is beyond float16", "rows of NaN"),
}
#: Those that keep the contract: what is wrong with the others is their breach, not the way they are planted.
HONEST = ("honest", "honest_mask", "honest_documents")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    site = tmp_path_factory.mktemp("site")
    info = site / "planted_npu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted-npu\nVersion: 1.0\n")
    (info / "RECORD").write_text("")
    entries = [f"npu.{name} = tests.emulators.npu.planted:backend_{name}" for name in PLANTED]
    (info / "entry_points.txt").write_text("\n".join(["[polyattn.backends]", *entries, ""]))
    command = [sys.executable, "-m", "tests.emulators.npu.planted_worker"]
    done = subprocess.run(
        command, env=environment(site, "2.13.0"), cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("name", BREACHES)
def test_the_breach_is_caught(found: dict[str, Any], name: str) -> None:
    said = found[name] if "absent" not in found[name] else pytest.skip(found[name]["absent"])
    for mode, words in zip(("lint", "bare"), BREACHES[name], strict=True):
        assert any(words in problem for problem in said[mode]), (mode, said[mode])


@pytest.mark.parametrize("name", HONEST)
def test_the_contract_kept_passes(found: dict[str, Any], name: str) -> None:
    assert found[name]["lint"] == found[name]["bare"] == []
    assert found[name]["native"] >= 2


def test_every_planted_backend_has_its_row() -> None:
    assert set(BREACHES) | set(HONEST) == {*PLANTED, "laser_outliers"}
