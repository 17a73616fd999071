"""A missing `.to(device)` is caught: each backend runs on fake tensors of a device, and nothing stays on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.emulators.kit import ROOT
from tests.emulators.xpu.on_fakes import VENDORS
from tests.emulators.xpu.run_kit import ROOM

pytestmark = pytest.mark.emulated

#: What a slot may not claim here, and so refuses.
REFUSED = "UnsupportedRequest"


@pytest.mark.parametrize("vendor", VENDORS)
def test_nothing_stays_on_the_cpu(vendor: str, tmp_path: Any) -> None:
    env = ROOM.environment(tmp_path, [])
    entry = f"[polyattn.platforms]\nfake{vendor} = tests.emulators.xpu.on_fakes:{vendor}\n"
    (tmp_path / "emulated_xpu-1.0.dist-info" / "entry_points.txt").write_text(entry)
    command = [sys.executable, "-m", "tests.emulators.xpu.on_fakes", vendor]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    planted = found.pop("planted")["dense"]
    assert "on MUSA device" in planted or "must be on XPU" in planted or "same device" in planted, planted
    for backend, outcomes in found.items():
        wrong = {kind: said for kind, said in outcomes.items() if said != "ran on cuda" and REFUSED not in said}
        assert wrong == {}, (backend, wrong)
        assert "ran on cuda" in outcomes.values(), (backend, outcomes)
