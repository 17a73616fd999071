"""flash_attn's real Python package over its two emulated routes, each scene in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.emulators.kit import PACKAGES, ROOT, has_package
from tests.emulators.rocm.run_kit import ROOM

pytestmark = pytest.mark.emulated

TRITON = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
#: How to have the package without its extension.
COMMAND = (
    "FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation --no-deps "
    "flash-attn==2.8.3.post2 einops"
)
TRITON_SCENES = (
    "triton_answers", "triton_ignores", "triton_refuses", "triton_lse", "triton_lse_overrun", "triton_out_overrun",
)  # fmt: skip


def run(function: str, *emulators: str, **env: str) -> subprocess.CompletedProcess[str]:
    need_package()
    command = [sys.executable, "-m", "tests.emulators.rocm.scene", function, *emulators]
    with TemporaryDirectory() as site:
        clean = ROOM.environment(Path(site), []) | env
        return subprocess.run(command, env=clean, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def need_package() -> None:
    """Skip where flash_attn's Python package is not in reach."""
    if not has_package("flash_attn"):
        pytest.skip(f"flash_attn's Python package is not here ({COMMAND}; or {PACKAGES}=FOLDER that has it)")


def test_over_composable_kernel() -> None:
    done = run("extension", "rocm.flash_attn_2_cuda")
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("scene", TRITON_SCENES)
def test_over_triton(scene: str) -> None:
    done = run(scene, "rocm.triton_amd", **{TRITON: "TRUE"})
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("value", ["true", "1", "TRUE "])
def test_the_triton_route_wants_exactly_true(value: str) -> None:
    done = run("triton_answers", "rocm.triton_amd", **{TRITON: value})
    assert "only where FLASH_ATTENTION_TRITON_AMD_ENABLE is exactly TRUE" in done.stderr


def test_the_extension_is_not_asked_on_the_triton_route() -> None:
    assert "takes its Triton route" in run("extension", "rocm.flash_attn_2_cuda", **{TRITON: "TRUE"}).stderr


@pytest.mark.slow
def test_the_vendors_kernel_in_the_interpreter_gives_what_its_emulator_gives() -> None:
    done = run("kernels", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
