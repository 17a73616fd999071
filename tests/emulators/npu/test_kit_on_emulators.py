"""The conformance kit over every NPU backend on the emulated device, with lint: all in bfloat16 on one chip each.

Some structures run in the other dtypes, on other chips and CANNs too; the rest of those takes minutes (`run_kit`).
"""

from __future__ import annotations

import os
import sys

import pytest

from polyattn.vendor import generic_backends
from polyattn_npu.backends import BACKENDS
from tests.emulators.npu.run_kit import PACKAGES, WorkerFailedError, has_package, run_kit

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

#: Backend -> the machine it is for.
STACKS = {
    "fusion": {"soc": "A2"},
    "mindie": {"soc": "A3"},
    "laser": {"soc": "A2"},
    "fia": {"soc": "A2"},
    "quant": {"soc": "A5", "mindiesd": "unreleased"},
}
#: Backend -> native cases that it must have at least.
NATIVE = {"fusion": 500, "mindie": 150, "laser": 10, "fia": 600, "quant": 20}
#: What a structure that a backend claims must have of them at least: one whose cases are all refused proves nothing.
OF_A_STRUCTURE = 3
#: Kinds of requests that are another structure's.
_ROOMS = {"prefix_kv": "key_padding", "bias": "mask"}
#: Those that take no fewer than 2048 rows, which no case of the kit has.
LONG = ("laser",)
#: Those that call the vendor's Python package.
OVER_MINDIESD = ("mindie", "laser", "quant")
NAMES = [*STACKS, *sorted({b.name for b in BACKENDS} - {b.name for b in generic_backends()} - set(STACKS))]


@pytest.mark.parametrize("backend", NAMES)
def test_the_kit_is_green(backend: str) -> None:
    _need_package(backend)
    report = run_kit(f"npu:{backend}", dtypes=("bfloat16",), long=backend in LONG, **STACKS.get(backend, {}))
    assert [f"{failure['case']}: {'; '.join(failure['problems'])}" for failure in report["failures"]] == []
    assert report["lints"] == []
    assert report["skipped"] == {}
    natives = {name: results["native"] for name, results in report["counts"][f"npu:{backend}"].items()}
    assert sum(natives.values()) >= NATIVE.get(backend, 30)
    assert {name: natives.get(name, 0) for name in _claimed(backend) if natives.get(name, 0) < OF_A_STRUCTURE} == {}
    assert report["ops"], "no native op was called"
    stack = report["stack"]
    sys.stdout.write(f"npu:{backend} on {stack}, ops {report['ops']}\n")  # pytest -rP shows it
    if backend in OVER_MINDIESD:
        assert stack["mindiesd_package"] == "3.1.0"
        assert stack["mindiesd_file"].endswith(os.path.join("mindiesd", "__init__.py"))


#: Backend, structures, dtype and machine, beside those above: what differs there.
MORE: dict[str, tuple[str, list[str], str, dict[str, str]]] = {
    "float16 masks and biases, before the scale": ("fusion", ["mask"], "float16", {"soc": "A3"}),
    "float32 documents": ("fusion", ["packed"], "float32", {"soc": "A5"}),
    "documents on a CANN that does not take their head dim": ("fia", ["packed"], "bfloat16", {"cann": "8.2"}),
    "documents on a stack that averages without a mask": ("fia", ["packed"], "bfloat16", {"cann": "broken"}),
    "pages in float16": ("fia", ["paged"], "float16", {"soc": "A3"}),
    "torch's SDPA over the fused op": ("sdpa", ["dense", "key_padding", "mask", "packed"], "float16", {}),
    "torch's SDPA over matmuls": ("sdpa", ["mask"], "float16", {"soc": "310P"}),
    "prompt_flash_attn's chip": ("mindie", ["dense"], "float16", {"soc": "310P"}),
}


@pytest.mark.parametrize("named", MORE)
def test_the_kit_is_green_where_something_differs(named: str) -> None:
    backend, structures, dtype, stack = MORE[named]
    _need_package(backend)
    report = run_kit(f"npu:{backend}", structures=structures, dtypes=(dtype,), **stack)
    assert [f"{failure['case']}: {'; '.join(failure['problems'])}" for failure in report["failures"]] == []
    assert report["lints"] == []
    assert report["ops"], "no native op was called"
    counts = report["counts"][f"npu:{backend}"]
    assert [name for name in structures if counts[name]["native"] < OF_A_STRUCTURE] == []
    fused = [op for op in report["ops"] if op.startswith("npu::npu_fusion_attention")]
    assert backend != "sdpa" or bool(fused) == (stack.get("soc") != "310P"), report["ops"]


def test_a_backend_that_is_not_here_is_an_error() -> None:
    with pytest.raises(WorkerFailedError, match="npu:no_such: no such backend here"):
        run_kit("npu:no_such")


def test_the_kit_runs_on_the_emulated_device() -> None:
    report = run_kit("npu:sdpa", structures=["dense"], dtypes=["float16"])
    assert report["failures"] == []
    assert report["counts"]["npu:sdpa"]["dense"]["native"] > 80


def _claimed(backend: str) -> set[str]:
    """The structures of the kit that its slots take."""
    slots = next(known.slots for known in BACKENDS if known.name == backend)
    return {_ROOMS.get(kind, kind) for slot in slots for kind in slot.features.kinds}


def _need_package(backend: str) -> None:
    if backend not in OVER_MINDIESD:
        return
    if not has_package("mindiesd"):
        pytest.skip(f"{backend}: pip install --no-deps --target FOLDER mindiesd==3.1.0, and {PACKAGES}=FOLDER")
