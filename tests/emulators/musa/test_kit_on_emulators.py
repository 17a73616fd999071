"""The conformance kit over every MUSA backend on its emulator, with lint: each structure, in bfloat16."""

from __future__ import annotations

import importlib

import pytest

from tests.emulators.kit import WorkerFailedError
from tests.emulators.musa.run_kit import run_kit

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

#: Backend -> the dtype that it is asked for, native cases that it must have at least, the kernels that must have run.
NATIVE = {
    "mate": ("bfloat16", 400, {"asm", "mutlass"}),
    "mudnn": ("bfloat16", 120, {"varlen"}),
    "sdpa": ("bfloat16", 700, set()),
    "blocked": ("float32", 700, set()),
}


@pytest.mark.parametrize("backend", NATIVE)
def test_the_kit_is_green(backend: str) -> None:
    dtype, native, kernels = NATIVE[backend]
    report = run_kit(backend, dtypes=(dtype,))
    assert [f"{failure['case']}: {'; '.join(failure['problems'])}" for failure in report["failures"]] == []
    assert report["lints"] == []
    assert report["skipped"] == {}
    assert sum(results["native"] for results in report["counts"][f"cpu:musa_{backend}"].values()) >= native
    assert set(report["ops"]) >= kernels


@pytest.mark.parametrize(("backend", "stack"), [("mate", {"card": "S4000"}), ("mudnn", {"card": "S80"})])
def test_a_card_without_kernels_has_no_native_case(backend: str, stack: dict) -> None:
    report = run_kit(backend, dtypes=("float16",), structures=("dense", "packed"), named="plain", **stack)
    assert report["lints"] == []
    assert report["ops"] == {}
    assert report["failures"] == []


def test_every_backend_of_the_platform_is_here() -> None:
    backends = importlib.import_module("polyattn_musa.backends").BACKENDS
    assert {backend.name for backend in backends} == set(NATIVE)


def test_a_backend_that_is_not_here_is_an_error() -> None:
    with pytest.raises(WorkerFailedError, match="no_such"):
        run_kit("no_such")
