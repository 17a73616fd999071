"""The conformance kit over every ROCm backend whose native ops are emulated, on the machines that it may meet."""

from __future__ import annotations

from typing import Any

import pytest

from tests.emulators.kit import WorkerFailedError
from tests.emulators.rocm.emulated import EMULATORS, backend_of
from tests.emulators.rocm.run_kit import run_kit
from tests.emulators.rocm.test_flash_attn_package import need_package

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

#: Those that stand under flash_attn's real Python package.
UNDER_FLASH_ATTN = ("flash_attn", "flash_attn_triton")
#: The interpreter computes bfloat16 wrongly, and takes long: one structure of it, in float32.
INTERPRETED: dict[str, Any] = {"dtypes": ("float32",), "structures": ("dense",)}
#: Machines beside the default one, with what is asked on them.
MACHINES = (
    ("aiter", {"arch": "gfx950"}),
    ("aiter", {"aiter": "main-2026-08"}),
    ("flash_attn", {"arch": "gfx90a"}),
    ("torch_varlen", {"torch": "2.11.0+rocm7.2"}),
    ("torch_varlen", {"torch": "2.13.0+rocm7.2.packed"}),
)


def green(backend: str, **asked: Any) -> int:
    """The cases that ran natively; none failed, none was skipped, nothing was answered otherwise than asked."""
    if backend in UNDER_FLASH_ATTN:
        need_package()
    report = run_kit(backend, **{"dtypes": ("bfloat16",), **asked})
    assert [f"{failure['case']}: {'; '.join(failure['problems'])}" for failure in report["failures"]] == []
    assert report["skipped"] == {}
    assert report["lints"] == []
    return sum(results["native"] for results in report["counts"][f"cpu:rocm_{backend}"].values())


@pytest.mark.parametrize("backend", EMULATORS)
def test_the_kit_is_green(backend: str) -> None:
    asked = INTERPRETED if backend == "triton" else {}
    assert green(backend, **asked) > (50 if backend == "triton" else 300)


@pytest.mark.parametrize(("backend", "machine"), MACHINES)
def test_the_kit_is_green_on_other_machines(backend: str, machine: dict[str, str]) -> None:
    assert green(backend, structures=("dense", "packed", "paged"), **machine) > 100


@pytest.mark.parametrize("backend", ["aiter", "flash_attn"])
def test_a_chip_without_the_kernels_is_refused(backend: str) -> None:
    assert green(backend, structures=("dense",), arch="gfx1100") == 0


def test_a_backend_that_the_platform_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMULATORS, "no_such", ())
    with pytest.raises(LookupError, match="rocm:no_such"):
        backend_of("no_such")


def test_a_package_that_no_emulator_passes_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EMULATORS, "aiter", ())
    with pytest.raises(LookupError, match="amd-aiter"):
        backend_of("aiter")


def test_a_worker_that_fails_says_why() -> None:
    with pytest.raises(WorkerFailedError, match="no_such_dtype"):
        run_kit("sdpa", dtypes=["no_such_dtype"])
