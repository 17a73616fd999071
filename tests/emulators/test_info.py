"""`polyattn info` on each emulated device: the vendor's platform is current, and its flags are those of its slots."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from polyattn.vendor import Accepted, Backend, Capability, Machine, capabilities_of, resolve
from scripts.capabilities_page import written
from tests.emulators.kit import PACKAGES, has_package
from tests.emulators.kit_requests import kit_requests

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).parents[2]
#: Vendor -> the real package that its emulator needs, and the backends that are not usable, by a word of the reason.
VENDORS: dict[str, tuple[str, dict[str, str]]] = {
    "xpu": ("vllm_xpu_kernels", {"ipex": "loads beside torch 2.8 only, and this is 2.14", "triton": "triton-xpu"}),
    "musa": ("", {}),
    "rocm": ("flash_attn", {"flash_attn_triton": "FLASH_ATTENTION_TRITON_AMD_ENABLE is not set"}),
}


@cache
def told(vendor: str) -> dict[str, Any]:
    package, _ = VENDORS[vendor]
    if package and not has_package(package):
        pytest.skip(f"{package} is not here ({PACKAGES}=FOLDER that has it)")
    command = [sys.executable, "-m", "tests.emulators.info", vendor, "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def page(vendor: str) -> dict[str, set[str]]:
    """Backend -> the flags that docs/capabilities.md does not call refused."""
    section = written().partition(f"(`{vendor}`)")[2].partition("## ")[0]
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in section.splitlines() if "|" in line]
    flags = [row for row in rows if row[0] in Capability.__members__]
    return {
        name: {row[0] for row in flags if row[place] != "refused"} for place, name in enumerate(rows[0]) if place > 0
    }


def backends_of(vendor: str) -> tuple[Backend, ...]:
    found: tuple[Backend, ...] = import_module(f"polyattn_{vendor}.backends").BACKENDS
    return found


def in_use(facts: dict[str, Any], vendor: str) -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in facts["in_use"] if one["platform"] == vendor)
    return found


@pytest.mark.parametrize("vendor", VENDORS)
def test_info_tells_the_current_vendors_true_flags(vendor: str) -> None:
    facts = told(vendor)
    assert facts["current_platform"]["name"] == vendor
    assert facts["problems"] == []
    mine = in_use(facts, vendor)
    shown = {name: set(one["capabilities"]) for name, one in mine["capabilities"]["backends"].items()}
    slots = {one.name: one.slots for one in backends_of(vendor)}
    assert shown == {
        name: {
            flag for flag, value in Capability.__members__.items()
            if any(value in capabilities_of(slot.features) for slot in of_one)
        }
        for name, of_one in slots.items()
    }  # fmt: skip
    assert shown == page(vendor)


@pytest.mark.parametrize("vendor", VENDORS)
def test_info_calls_usable_what_the_resolver_would_let_run_and_gives_its_reasons_for_the_rest(vendor: str) -> None:
    mine = in_use(told(vendor), vendor)
    machine = Machine.from_dict(mine["devices"][0])
    requests = kit_requests(f"{machine.device_type}:0")
    unusable = {}
    for backend, told_of in zip(backends_of(vendor), mine["backends"], strict=True):
        assert told_of["backend"] == f"{vendor}:{backend.name}"
        decisions = [resolve(request, machine, [backend])[0] for request in requests]
        if any(isinstance(decision, Accepted) for decision in decisions):
            assert (told_of["status"], told_of["reasons"]) == ("usable", [])
            continue
        unusable[backend.name] = "; ".join(told_of["reasons"])
        assert told_of["status"] == ("missing package" if decisions[0].missing_package else "not usable")
        assert told_of["reasons"]
        for decision in decisions:  # whatever is asked, this is among the answers
            assert set(told_of["reasons"]) <= set(decision.reasons), decision
    expected = VENDORS[vendor][1]
    assert unusable.keys() == expected.keys()
    assert all(word in unusable[name] for name, word in expected.items())
