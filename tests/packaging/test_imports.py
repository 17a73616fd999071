"""What is imported, and when: nothing of a vendor, of a tool or of torch before it is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.distributions import ROOT, VENDORS

SOURCES = [ROOT / "core" / "src", *(ROOT / "platforms" / vendor / "src" for vendor in VENDORS)]

LOADED = (
    "import json, sys; before = set(sys.modules); {statement}; print(json.dumps(sorted(set(sys.modules) - before)))"
)


def loaded_by(statement: str, *first_on_path: Path) -> list[str]:
    """Modules that a statement loads in a fresh interpreter."""
    path = os.pathsep.join(map(str, [*first_on_path, *SOURCES]))
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(statement=statement)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


def foreign(modules: list[str], *allowed: str) -> set[str]:
    """Top-level names of neither the standard library nor `allowed`."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - set(allowed)


def test_importing_polyattn_loads_no_vendor_and_no_tool() -> None:
    tops = {name.partition(".")[0] for name in loaded_by("import polyattn")}
    unwanted = {
        "triton",
        "transformers",
        "diffusers",
        "rich",
        "numpy",
        "pytest",
        "hypothesis",
        "torch_npu",
        "torch_musa",
    }
    assert tops & (unwanted | {f"polyattn_{vendor}" for vendor in VENDORS}) == set()


def test_polyattn_imports_where_torch_does_not(tmp_path: Path) -> None:
    """A broken plugin of torch makes `import torch` raise; `polyattn info` must still be able to say so."""
    (tmp_path / "torch.py").write_text('raise RuntimeError("Failed to load the backend extension: torch_npu")\n')
    assert "torch" not in loaded_by("import polyattn", tmp_path)


def test_the_door_needs_the_standard_library_alone() -> None:
    assert foreign(loaded_by("import polyattn.vendor"), "polyattn") == set()


@pytest.mark.parametrize("vendor", VENDORS)
def test_an_entry_point_loads_the_door_and_nothing_else(vendor: str) -> None:
    door = set(loaded_by("import polyattn.vendor"))
    modules = loaded_by(f"import polyattn_{vendor}; polyattn_{vendor}.platform()")
    assert foreign(modules, "polyattn", f"polyattn_{vendor}") == set()
    assert {name for name in modules if name.partition(".")[0] == "polyattn"} <= door
    assert f"polyattn_{vendor}.backends" not in modules
