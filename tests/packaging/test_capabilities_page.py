"""docs/capabilities.md has what the slots state and the kit proved, whatever happens to be installed here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from polyattn.backends import torch_varlen
from polyattn.testing.cases import ALL_CASES
from polyattn.vendor import Capability
from scripts import capabilities_page
from scripts.capabilities_page import STRUCTURE_OF, Run, cell, emulated, recorded, recorded_by_hand, written
from tests.packaging.distributions import ROOT, VENDORS

#: Releases whose flags are others than the reference build's.
OTHERS = {"sageattention": "2.2.0", "flash_attn_3": "3.0.0", "flash_attn": "2.8.3"}


def shown(*folders: Path) -> str:
    """The tables as a process of its own writes them, with these folders of packages."""
    sources = [ROOT / "platforms" / vendor / "src" for vendor in VENDORS]
    done = subprocess.run(
        [sys.executable, "-m", "scripts.capabilities_page", "--print"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (*folders, *sources)))},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_page_is_what_the_slots_state_and_the_kit_proved() -> None:
    assert written() == shown(), "python -m scripts.capabilities_page writes it anew"


def test_what_is_installed_does_not_matter(tmp_path: Path) -> None:
    for name, version in OTHERS.items():
        info = tmp_path / f"{name}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    asks = "from polyattn.vendor import installed_versions as i; print(i(['sageattention', 'flash_attn_3']))"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert "2.2.0" in subprocess.check_output([sys.executable, "-c", asks], env=env, text=True)
    assert shown(tmp_path) == written()


def test_the_reference_build_is_named_on_the_page_and_takes_what_that_torch_takes() -> None:
    assert f"torch {capabilities_page.TORCH}" in capabilities_page.PAGE.read_text(encoding="utf-8")
    if torch.__version__.partition("+")[0] != capabilities_page.TORCH:
        pytest.skip(f"torch {capabilities_page.TORCH} is asked what its varlen_attn takes, this is {torch.__version__}")
    assert torch_varlen.PARAMETERS == capabilities_page.VARLEN_ATTN


def test_structures_are_the_kits_and_capabilities_the_doors() -> None:
    assert set(STRUCTURE_OF) <= set(Capability.__members__)
    assert set(STRUCTURE_OF.values()) <= {case.structure for case in ALL_CASES}


WHOLE, CUT = Run(True, frozenset({"dense", "packed"}), ""), Run(False, frozenset({"dense", "packed"}), "")
SOME = emulated(["float32"], ["dense"])


@pytest.mark.parametrize(
    ("flag", "device", "emulator", "says"),
    [
        ("SPANS", WHOLE, emulated(["bfloat16"]), "refused"),
        ("LSE", WHOLE, emulated(["bfloat16"]), "hardware"),
        ("MULTI_DOC_VARLEN", WHOLE, None, "hardware"),
        ("MULTI_DOC_VARLEN", CUT, None, "in part"),
        ("MULTI_DOC_VARLEN", CUT, emulated(["bfloat16"]), "in part, emulator"),
        ("MULTI_DOC_VARLEN", None, SOME, "claimed"),
        ("PAGED_KV", WHOLE, None, "claimed"),
        ("PAGED_KV", WHOLE, emulated(["bfloat16"]), "emulator"),
        ("LSE", None, SOME, "emulator"),
        ("GRAPH_CAPTURE", None, emulated(["bfloat16"]), "claimed"),
        ("GRAPH_CAPTURE", WHOLE, None, "hardware"),
        ("LSE", None, None, "claimed"),
    ],
)
def test_a_cell_says_no_more_than_was_proved(flag: str, device: Run | None, emulator: Run | None, says: str) -> None:
    claimed = ["LSE", "MULTI_DOC_VARLEN", "PAGED_KV", "GRAPH_CAPTURE"]
    assert cell(flag, claimed, device, emulator) == says


def record(*failures: str, ok: bool, ran: int) -> dict:
    counts = {"dense": {"native": 3, "failed": len(failures)}, "paged": {"native": 0, "failed": 0}}
    told = [{"case": f"dense/{at}", "problems": [problem]} for at, problem in enumerate(failures)]
    backend = {"backend": "toy:one", "ok": ok, "planned": 9, "ran": ran, "counts": counts, "failures": told}
    return {"machine": {"device": "Toy", "versions": {"torch": "2.11.0"}, "date": "2026-11-30"}, "backends": [backend]}


def test_a_record_counts_what_ran_natively() -> None:
    assert recorded(record(ok=True, ran=9)) == {
        "toy:one": Run(True, frozenset({"dense"}), "Toy, torch 2.11.0, 2026-11-30: 9 of 9 cases")
    }


def test_a_record_that_was_cut_short_says_so_and_one_that_was_wrong_is_no_proof() -> None:
    cut = recorded(record("began and did not end", ok=False, ran=5))["toy:one"]
    assert (cut.whole, cut.words) == (False, "Toy, torch 2.11.0, 2026-11-30: 5 of 9 cases, 1 began and did not end")
    with pytest.raises(ValueError, match="dense/0"):
        recorded(record("out differs by 0.5", ok=False, ran=9))


def test_a_record_by_runs_names_dtypes_and_what_did_not_finish() -> None:
    runs = [
        {"run": "toy_one_bfloat16-float16", "ok": True, "cases": {"dense": 1, "mask": 2}, "failures": 0},
        {"run": "toy_two_float32_mask-key_padding", "ok": True, "cases": {"mask": 2, "key_padding": 3}, "failures": 0},
    ]
    machine = {"device": "Toy", "torch": "2.11.0+cu130", "date": "2026-11-30"}
    told = recorded_by_hand({"machine": machine, "ran": runs, "not finished": ["toy:two float16: stopped"]})
    assert told == {
        "toy:one": Run(True, frozenset({"dense", "mask"}), "Toy, torch 2.11.0, 2026-11-30: bfloat16, float16"),
        "toy:two": Run(
            False, frozenset({"mask", "key_padding"}), "Toy, torch 2.11.0, 2026-11-30: float32 (mask, key_padding)"
        ),
    }
