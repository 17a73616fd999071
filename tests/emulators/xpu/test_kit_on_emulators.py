"""The conformance kit over every XPU backend on its emulator, with lint: each structure, in its dtypes."""

from __future__ import annotations

import importlib

import pytest

from tests.emulators.kit import PACKAGES, WorkerFailedError, has_package
from tests.emulators.xpu.run_kit import run_kit

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

#: Backend -> the dtypes that it is asked for, and native cases that it must have at least.
#:
#: Triton's interpreter computes bfloat16 dots wrongly.
NATIVE = {
    "vllm_xpu": (("bfloat16",), 250),
    "ipex": (("bfloat16",), 100),
    "sdpa": (("bfloat16",), 700),
    "blocked": (("float32",), 700),
    "triton": (("float32",), 100),
}
#: What of the kit the interpreter has time for.
STRUCTURES = {"triton": ("dense",)}
#: Emulated kernels that each must have run, or their counts say nothing.
OPS = {"vllm_xpu": ("prefill",), "ipex": ("varlen",)}


@pytest.mark.parametrize("backend", NATIVE)
def test_the_kit_is_green(backend: str) -> None:
    _need_package(backend)
    dtypes, native = NATIVE[backend]
    report = run_kit(backend, dtypes=dtypes, structures=STRUCTURES.get(backend))
    assert [f"{failure['case']}: {'; '.join(failure['problems'])}" for failure in report["failures"]] == []
    assert report["lints"] == []
    assert report["skipped"] == {}
    assert sum(results["native"] for results in report["counts"][f"cpu:xpu_{backend}"].values()) >= native
    assert all(any(name.startswith(op) for name in report["ops"]) for op in OPS.get(backend, ())), report["ops"]


def test_the_kit_is_green_on_the_other_family() -> None:
    _need_package("vllm_xpu")
    report = run_kit("vllm_xpu", dtypes=("float16",), structures=("dense", "packed", "paged"), device="PTL")
    assert [f"{failure['case']}: {'; '.join(failure['problems'])}" for failure in report["failures"]] == []
    assert report["lints"] == []


def test_every_backend_of_the_platform_is_here() -> None:
    backends = importlib.import_module("polyattn_xpu.backends").BACKENDS
    assert {backend.name for backend in backends} == set(NATIVE)


def test_a_device_without_kernels_has_no_native_case() -> None:
    _need_package("vllm_xpu")
    report = run_kit("vllm_xpu", dtypes=("float16",), structures=("dense",), named="plain", device="ACM")
    assert report["lints"] == []
    assert report["ops"] == {}
    assert report["failures"] == []


def test_a_backend_that_is_not_here_is_an_error() -> None:
    with pytest.raises(WorkerFailedError, match="no_such"):
        run_kit("no_such")


def _need_package(backend: str) -> None:
    """The kit of vllm_xpu runs the vendor's own Python; everything else is all here."""
    if backend == "vllm_xpu" and not has_package("vllm_xpu_kernels"):
        pytest.skip(
            f"{backend}: pip install --no-deps --target FOLDER vllm-xpu-kernels==0.1.16.2, and {PACKAGES}=FOLDER"
        )
