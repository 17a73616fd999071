"""A mindiesd that is installed and cannot be imported: a reason against its backends, and the others run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulators.npu.run_kit import ROOT, environment

pytestmark = pytest.mark.emulated

#: Runs on a machine of argv[1], with a mindiesd on the path that raises.
SCRIPT = """
import sys, torch
from tests.emulators.npu import torch_npu_module
from tests.emulators.npu.stack import using
with using(soc=sys.argv[1]):
    torch_npu_module.install()
    import polyattn as pa
    q = torch.randn(1, 64, 2, 64, dtype=torch.float16).npu()
    for choice in (None, "mindie,auto", "laser,mindie,auto"):
        out = pa.attention(q, q, q, backend=choice)
    told = str(pa.explain(q, q, q, backend="mindie,auto"))
    assert "libatb.so" in told, told
    try:
        pa.attention(q, q, q, backend="mindie")
    except pa.UnsupportedRequest as error:
        assert "libatb.so" in str(error), error
    else:
        raise AssertionError("it ran")
"""


@pytest.mark.parametrize("soc", ["310P", "A2"])
def test_the_others_run_and_a_choice_of_it_alone_says_why(tmp_path: Path, soc: str) -> None:
    for name, version in {"mindiesd": "3.1.0", "einops": "0.8.0", "safetensors": "0.5.0"}.items():
        (info := tmp_path / f"{name}-{version}.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (package := tmp_path / "mindiesd").mkdir()
    (package / "__init__.py").write_text("raise OSError('libatb.so: cannot open shared object file')\n")
    variables = environment(tmp_path, "2.13.0")
    variables["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, soc], env=variables, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
