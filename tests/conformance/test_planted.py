"""Wrong backends are caught: each is installed through a real entry point, and the kit names the case it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

WORKER = Path(__file__).parent / "planted" / "worker.py"

#: Planted backend -> the structures it is tried with ("": all), a case that must fail, and words of its problem.
FAULTS = {
    "drops_mask": ("mask", "mask/rank2[float32]", "output"),
    "top_left_causal": ("dense", "dense/causal_more_keys[float32]", "output"),
    "ignores_scale": ("dense", "dense/scale_given[float32]", "output"),
    "leaks_across_documents": ("packed", "packed/plain[float32]", "output"),
    "leaves_pad_rows_unwritten": ("packed", "packed/real_and_pad[float32]", "rows that see no key are not 0"),
    "mutates_k": ("dense", "dense/plain[float32]", "k was modified"),
    "nan_on_empty_rows": ("mask", "mask/rows_of_nothing[float32]", "output"),
    "lse_in_base_2": ("dense", "dense/plain+lse[float32]", "LSE"),
    "drops_out": ("dense", "dense/out[float32]", "another tensor than the given buffer"),
    "ignores_window": ("dense", "dense/window_left[float32]", "output"),
    "interleaves_kv_heads": ("dense", "dense/gqa[float32]", "output"),
    "lets_garbage_through": ("key_padding", "key_padding/garbage[float32]", "NaN"),
    "detaches_v": ("dense", "dense/plain+grad[float32]", "gradient of v"),
    "is_random": ("dense", "dense/deterministic[float32]", "differ in their bits"),
    "refuses_what_it_claims": ("", "claims/softcap", "not one case of it is accepted"),
}


@pytest.fixture(scope="module")
def reports(planted_environment: dict[str, str]) -> dict[str, Any]:
    wanted = ["honest", *(f"{name}={structures}" for name, (structures, _, _) in FAULTS.items())]
    done = subprocess.run([sys.executable, WORKER, *wanted], env=planted_environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_every_planted_backend_has_its_row(planted_names: list[str]) -> None:
    assert set(planted_names) == {*FAULTS, "honest"}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_caught_and_the_case_is_named(fault: str, reports: dict[str, Any]) -> None:
    _, case, words = FAULTS[fault]
    assert not reports[fault]["ok"]
    told = {failure["case"]: "; ".join(failure["problems"]) for failure in reports[fault]["failures"]}
    assert case in told
    assert words in told[case]


def test_the_honest_twin_passes_natively_and_through_compositions(reports: dict[str, Any]) -> None:
    report = reports["honest"]
    assert report["failures"] == []
    counts = report["counts"]["cpu:honest"]
    assert counts["dense"]["native"] > 100
    assert counts["spans"]["generic"] > 100


def test_verify_fails_and_names_the_case(planted_environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", "import sys; from polyattn.cli import main; sys.exit(main())", "verify"]
    done = subprocess.run(
        [*command, "--backend", "cpu:drops_mask"], env=planted_environment, capture_output=True, text=True
    )
    assert done.returncode == 1, done.stderr
    assert "mask/plain[float32]" in done.stdout
    assert "FAILED" in done.stdout
