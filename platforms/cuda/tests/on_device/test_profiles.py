"""What a profiler shows of a call: a range of the route's name, and no copies where none are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import polyattn as pa
from platforms.cuda.tests.on_device.here import DEVICE, Name, assert_right, attend, dtype_of, every_backend, qkv
from platforms.cuda.tests.on_device.structures import STRUCTURES, Made, every_structure

pytestmark = pytest.mark.cuda

#: Operators of torch that move token rows.
MOVES = ("index", "gather", "scatter", "copy", "cat", "clone", "contiguous", "masked_fill", "pad", "nonzero")


def profiled(call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the call gives, and the names of all that ran on the host."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        result = call()
    return result, [event.name for event in found.events()]


@every_backend
@every_structure
def test_a_range_bears_the_routes_name(backend: Name, make: Callable[[torch.dtype, int], Made]) -> None:
    made = make(dtype_of(backend), 0)
    attend(backend, *made.tensors, **made.given)
    with pa.record_routes() as log:
        _, names = profiled(lambda: pa.attention(*made.tensors, backend=backend, **made.given))
    assert log.entries[0].route in names


def test_a_range_bears_the_routes_name_in_a_layer_too() -> None:
    made = STRUCTURES["packed"](torch.bfloat16, 0)
    layer = pa.Attention(8, 128)
    _, names = profiled(lambda: layer(*made.tensors, **made.given))
    assert layer.last_route.name in names


def test_no_range_is_recorded_where_no_profiler_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = STRUCTURES["dense"](torch.bfloat16, 0)

    def forbidden(name: str) -> None:
        raise AssertionError(f"a range {name} was opened")

    monkeypatch.setattr(torch.autograd.profiler, "record_function", forbidden)
    assert_right(pa.attention(*made.tensors, **made.given), *made.tensors, **made.given)


HOMOGENEOUS = {
    "dense": (lambda: None, (2, 512)),
    "equal documents": (lambda: pa.Packed.from_lengths([256] * 4), (1024,)),
    "unequal documents": (lambda: pa.Packed.from_lengths([256, 700, 68]), (1024,)),
    "nothing padded": (lambda: pa.KeyPadding.from_lengths([512, 512], 512), (2, 512)),
    "one prefix": (lambda: pa.KeyPadding.from_lengths([400, 400], 512, queries="all"), (2, 512)),
}


@pytest.mark.parametrize("name", HOMOGENEOUS)
@pytest.mark.parametrize("backend", [None, "fa3"], ids=["auto", "fa3"])
def test_batches_that_need_no_packing_move_no_rows(backend: Name, name: str) -> None:
    structure, rows = HOMOGENEOUS[name]
    q, k, v = qkv(rows)
    made = structure()
    attend(backend, q, k, v, structure=made)
    out, names = profiled(lambda: pa.attention(q, k, v, structure=made, backend=backend))
    moved = [name for name in names if name.startswith("aten::") and any(move in name for move in MOVES)]
    assert moved == []
    assert_right(out, q, k, v, structure=made)


def test_a_dense_call_launches_the_kernels_of_the_raw_one_alone() -> None:
    q, k, v = qkv((1, 512))
    attend("fa3", q, k, v)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        pa.attention(q, k, v, backend="fa3")
        torch.cuda.synchronize(DEVICE)
    kernels = [event.name for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in kernels if not name.startswith("cuda:")]
    assert len(kernels) <= 2, kernels  # attention, and its scheduler's counter
    assert any("flash" in name for name in kernels)
