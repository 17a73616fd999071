"""Wrong backends are caught: each is installed through a real entry point, and the kit names the case it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polyattn.testing.cases import ALL_CASES
from tests.conformance.planted_site import install, planted_backends

WORKER = Path(__file__).parent / "planted" / "worker.py"

#: Planted backend -> the structures it is tried with (behind a ":" a word of the cases' names), a case that must fail,
#: and words of its problem.
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
    "detaches_lse": ("dense", "dense/lse+grad[float32]", "LSE: no gradient flows through it"),
    "ignores_lse_gradient": ("dense", "dense/lse+grad[float32]", "gradient of q"),
    "shortcuts_in_graphs": ("dense", "dense/compiled[float32]", "output"),
    "is_too_tolerant": ("block_map", "claims/tolerance", "0.5 declared for float32 is above the ceiling 2e-05"),
    "raises_in_its_check": ("dense", "dense/plain[float32]", "its check raised ZeroDivisionError"),
    "is_random": ("dense", "dense/deterministic[float32]", "differ in their bits"),
    "is_poisoned_by_neighbours": ("packed:poisoned", "packed/poisoned_document[float32]", "NaN"),
    "ignores_quant": ("dense:quant", "dense/quant_fp8_across_blocks[float32]", "nothing was quantised"),
    "always_quantises": ("dense:quant", "dense/quant_fp8_skipped_layer[float32]", "output"),
    "rounds_too_far": ("dense:quant", "dense/quant_fp8[float32]", "of its norm, more than 0.12"),
    "scales_by_padding": (
        "key_padding:quant_int8",
        "key_padding/quant_int8_loud_padding[float32]",
        "of its norm, more than 0.08",
    ),
    "shares_a_scale": ("dense:quant", "dense/quant_fp8_poisoned_sample[float32]", "NaN"),
}

#: Right ones -> the structures they are tried with; "": all, and then the claims are asked for as well.
RIGHT = {
    "honest": "",
    "stays_out_of_graphs": "dense+packed",
    "requires_its_package": "dense",
    "quantises": "dense:quant",
    "only_quantises": "dense+key_padding+mask+packed",
}
NOT_READY = {"requires_a_newer_package": "package planted-attn 1.0 is older than 2.0: pip install -U planted-attn"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    tried = RIGHT | {name: structures for name, (structures, _, _) in FAULTS.items()} | dict.fromkeys(NOT_READY, "")
    wanted = [f"{name}={structures}" for name, structures in tried.items()]
    environment = install(tmp_path_factory.mktemp("site"), planted_backends())
    done = subprocess.run([sys.executable, WORKER, *wanted], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def reports(found: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = found["reports"]
    return kept


def test_every_planted_backend_has_its_row() -> None:
    assert set(planted_backends()) == {*FAULTS, *RIGHT, *NOT_READY, "refuses_what_it_claims"}


@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_caught_and_the_case_is_named(fault: str, reports: dict[str, Any]) -> None:
    _, case, words = FAULTS[fault]
    assert not reports[fault]["ok"]
    told = {failure["case"]: "; ".join(failure["problems"]) for failure in reports[fault]["failures"]}
    assert case in told
    assert words in told[case]


def test_what_is_wrong_in_one_surrounding_alone_fails_there_alone(reports: dict[str, Any]) -> None:
    for name, words in (("shortcuts_in_graphs", "compiled"), ("detaches_lse", "lse+grad")):
        assert {words in failure["case"] for failure in reports[name]["failures"]} == {True}


def test_the_honest_twin_passes_natively_and_through_compositions(reports: dict[str, Any]) -> None:
    report = reports["honest"]
    assert report["failures"] == []
    counts = report["counts"]["cpu:honest"]
    assert counts["dense"]["native"] > 100
    assert counts["spans"]["generic"] > 100


def test_a_slot_that_stays_out_of_graphs_is_refused_there_and_right_elsewhere(reports: dict[str, Any]) -> None:
    report = reports["stays_out_of_graphs"]
    assert report["failures"] == []
    in_float32 = [case for case in ALL_CASES if not case.autocast and case.quant is None]
    compiled = Counter(case.structure for case in in_float32 if case.compiled)
    for structure in ("dense", "packed"):
        counts = report["counts"]["cpu:stays_out_of_graphs"][structure]
        assert counts["refused"] == compiled[structure] > 0
        assert counts["native"] > 100


@pytest.mark.parametrize("name", ["quantises", "only_quantises"])
def test_a_backend_that_quantises_is_right_whether_or_not_it_has_an_exact_forward(
    name: str, found: dict[str, Any]
) -> None:
    report = found["reports"][name]
    assert report["failures"] == []
    assert found["unaccepted claims"][name] == []
    counts = report["counts"][f"cpu:{name}"]["dense"]
    assert counts["native"] > 20
    exact = [case for case in ALL_CASES if case.structure == "dense" and case.quant is None and not case.within]
    assert (counts["refused"] > len(exact) - 20) == (name == "only_quantises")


def test_a_package_that_only_a_third_party_knows_of_is_seen(reports: dict[str, Any]) -> None:
    assert reports["requires_its_package"]["skipped"] == {}
    assert reports["requires_its_package"]["ok"]


@pytest.mark.parametrize("name", NOT_READY)
def test_a_package_that_is_too_old_skips_with_the_way_out(name: str, reports: dict[str, Any]) -> None:
    assert reports[name]["skipped"] == {f"cpu:{name}": NOT_READY[name]}
    assert reports[name]["counts"] == {}
    assert not reports[name]["ok"]


def test_a_check_that_raises_is_a_reason_and_leaves_the_others_alone(found: dict[str, Any]) -> None:
    assert found["automatic"]["route"] == "cpu:sdpa"
    (reason,) = found["automatic"]["reasons"]["raises_in_its_check"]
    assert reason.startswith("its check raised ZeroDivisionError")


def test_verify_fails_and_names_the_claims_that_are_always_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; from polyattn.cli import main; sys.exit(main())", "verify"]
    done = subprocess.run(
        [*command, "--backend", "cpu:refuses_what_it_claims"],
        env=install(tmp_path, ["refuses_what_it_claims"]),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    for claim in ("claims/softcap", "claims/compile"):
        assert claim in done.stdout
    assert "FAILED" in done.stdout
