"""The emulated device under torch_npu, the real MindIE-SD and diffusers, each scene in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulators.npu.run_kit import PACKAGES, ROOT, environment, has_package

pytestmark = pytest.mark.emulated

HERE = "tests.emulators.npu"
#: Module of this folder, its scene, the machine, and the vendor's package that it needs.
SCENES = [
    ("scenes", "native", {}, ""),
    ("scenes", "written_places", {}, ""),
    ("scenes", "inference", {}, ""),
    ("scenes", "mindiesd", {}, "mindiesd"),
    ("scenes", "diffusers", {}, "diffusers"),
    ("scenes_versions", "gradients", {}, ""),
    ("scenes_versions", "buffers", {}, ""),
    ("scenes_versions", "fakes", {}, ""),
    ("scenes_versions", "records", {}, "mindiesd"),
    ("scenes_versions", "an_old_release", {"torch_npu": "2.6.0"}, ""),
    ("scenes_sdpa", "fused", {}, ""),
    ("scenes_sdpa", "fused", {"soc": "A5"}, ""),
    ("scenes_sdpa", "fused", {"torch_npu": "2.6.0"}, ""),
    ("scenes_sdpa", "plain", {"soc": "310P"}, ""),
    ("scenes_sdpa", "automatic", {}, ""),
    ("scenes_mindiesd", "refusals", {}, "mindiesd"),
    ("scenes_mindiesd", "lint", {"lint": True}, "mindiesd"),
    ("scenes_quant", "public_function", {"soc": "A5", "mindiesd": "unreleased"}, "mindiesd"),
    ("scenes_quant", "released_classes", {"soc": "A5"}, "mindiesd"),
    ("scenes_quant", "refusals", {"soc": "A5", "mindiesd": "unreleased"}, "mindiesd"),
    ("scenes_quant", "an_earlier_commit", {"soc": "A5", "mindiesd": "unreleased-fp8"}, "mindiesd"),
]


@pytest.mark.parametrize(
    ("module", "scene", "stack", "package"),
    SCENES,
    ids=[f"{m}-{s}-{'-'.join(map(str, on.values()))}" for m, s, on, _ in SCENES],
)
def test_scenes(module: str, scene: str, stack: dict, package: str, tmp_path: Path) -> None:
    if package and not has_package(package):
        pytest.skip(f"{package} is not here (pip install --no-deps --target FOLDER {package}; {PACKAGES}=FOLDER)")
    env = environment(tmp_path, stack.get("torch_npu", "2.13.0"))
    command = [sys.executable, "-m", f"{HERE}.scene", f"{HERE}.{module}", scene, json.dumps(stack)]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr[-3000:]
