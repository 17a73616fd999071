"""The conformance kit over every CUDA backend whose native ops are emulated: each structure, in bfloat16."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.emulators.cuda.emulated import EMULATORS
from tests.emulators.cuda.run_kit import PACKAGES, WorkerFailedError, run_kit
from tests.emulators.cuda.wrapped import backend_of

#: Backend -> the vendor's Python package that its emulator stands under, and how to have it without its extension.
UNDER = {
    "flash_attn": (
        "flash_attn",
        "FLASH_ATTENTION_FORCE_BUILD=TRUE FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE pip install --no-build-isolation "
        "--no-deps flash-attn==2.8.3.post2 einops",
    ),
}

pytestmark = [pytest.mark.emulated, pytest.mark.slow]


@pytest.mark.parametrize("backend", EMULATORS)
def test_the_kit_is_green(backend: str) -> None:
    _need_package(backend)
    report = run_kit(backend, dtypes=("bfloat16",))  # the one that all take; run_kit's command line has the others
    assert [f"{failure['case']}: {'; '.join(failure['problems'])}" for failure in report["failures"]] == []
    assert report["skipped"] == {}
    assert sum(results["native"] for results in report["counts"][f"cpu:{backend}"].values()) > 30


def test_a_backend_whose_package_no_emulator_passes_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMULATORS, "sage", ())
    with pytest.raises(LookupError, match="sageattention"):
        backend_of("sage")


def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(WorkerFailedError, match="no_such_dtype"):
        run_kit("fa3", dtypes=["no_such_dtype"])


def _need_package(backend: str) -> None:
    if backend not in UNDER:
        return
    package, command = UNDER[backend]
    folders = os.environ.get(PACKAGES, "").split(os.pathsep)
    if importlib.util.find_spec(package) is None and not any((Path(folder) / package).is_dir() for folder in folders):
        pytest.skip(f"{backend}: its Python package is not here ({command}; or {PACKAGES}=FOLDER that has it)")
