"""`polyattn info` on each emulated device: the vendor's platform is current, and its flags are those of its slots."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from polyattn.vendor import Capability, capabilities_of
from scripts.capabilities_page import written
from tests.emulators.kit import PACKAGES, has_package

pytestmark = pytest.mark.emulated

ROOT = Path(__file__).parents[2]
#: Vendor -> the real package that its emulator needs, and the backends that are not usable, by a word of the reason.
VENDORS: dict[str, tuple[str, dict[str, str]]] = {
    "xpu": ("vllm_xpu_kernels", {"ipex": "intel-extension-for-pytorch", "triton": "triton-xpu"}),
    "musa": ("", {}),
    "rocm": ("flash_attn", {}),
}


def told(vendor: str) -> dict[str, Any]:
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


@pytest.mark.parametrize("vendor", VENDORS)
def test_info_tells_the_current_vendors_true_flags(vendor: str) -> None:
    package, unusable = VENDORS[vendor]
    if package and not has_package(package):
        pytest.skip(f"{package} is not here ({PACKAGES}=FOLDER that has it)")
    facts = told(vendor)
    assert facts["current_platform"]["name"] == vendor
    assert facts["problems"] == []
    mine = next(one for one in facts["in_use"] if one["platform"] == vendor)
    shown = {name: set(one["capabilities"]) for name, one in mine["capabilities"]["backends"].items()}
    slots = {one.name: one.slots for one in import_module(f"polyattn_{vendor}.backends").BACKENDS}
    assert shown == {
        name: {
            flag for flag, value in Capability.__members__.items()
            if any(value in capabilities_of(slot.features) for slot in of_one)
        }
        for name, of_one in slots.items()
    }  # fmt: skip
    assert shown == page(vendor)
    for one in mine["backends"]:
        name = one["backend"].partition(":")[2]
        if name in unusable:
            assert one["status"] != "usable"
            assert unusable[name] in "; ".join(one["reasons"])
        else:
            assert one["status"] == "usable", one
