"""No call waits for the device, two streams do not disturb each other, and several devices serve one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import Name, assert_right, attend, drawn, dtype_of, every_backend, takes
from platforms.cuda.tests.on_device.structures import STRUCTURES, Made, every_structure
from platforms.cuda.tests.on_device.waiting import no_waiting

pytestmark = pytest.mark.cuda

Make = Callable[[torch.dtype, int], Made]


def test_the_mode_catches_what_reads_a_tensor_on_the_host() -> None:
    with no_waiting(), pytest.raises(RuntimeError, match="synchronizing"):
        drawn(3).sum().item()


@every_backend
@every_structure
def test_a_warm_call_waits_for_nothing(backend: Name, make: Make) -> None:
    made = make(dtype_of(backend), 0)
    attend(backend, *made.tensors, **made.given, return_lse=True)
    with no_waiting():
        out, _ = pa.attention(*made.tensors, backend=backend, return_lse=True, **made.given)
    assert_right(out, *made.tensors, **made.given)


@takes("backward")
@every_structure
def test_a_warm_backward_waits_for_nothing(backend: Name, make: Make) -> None:
    made = make(dtype_of(backend), 0)
    for tensor in made.tensors:
        tensor.requires_grad_()
    out = attend(backend, *made.tensors, **made.given)
    out.sum().backward()
    with no_waiting():
        pa.attention(*made.tensors, backend=backend, **made.given).sum().backward()
    assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in made.tensors)


@pytest.mark.parametrize("name", ["key_padding", "packed", "paged"])
def test_a_new_structure_of_known_lengths_waits_for_nothing_but_its_own_copies(name: str) -> None:
    """Sent ahead, it leaves nothing to wait for in its first call, once another of its kind was served."""
    pa.attention(*STRUCTURES[name](torch.bfloat16, 0).tensors, **STRUCTURES[name](torch.bfloat16, 0).given)
    made = STRUCTURES[name](torch.bfloat16, 1)
    made.given["structure"].to(made.q.device)
    torch.cuda.synchronize()
    with no_waiting():
        out = pa.attention(*made.tensors, **made.given)
    assert_right(out, *made.tensors, **made.given)


@every_backend
@every_structure
def test_two_streams_give_the_answers_of_one(backend: Name, make: Make) -> None:
    pair = [make(dtype_of(backend), seed) for seed in (0, 1)]
    shared = pair[0].given
    alone = [attend(backend, *made.tensors, **shared) for made in pair]
    busy = torch.ones(8192, 8192, device=pair[0].q.device)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    for stream in streams:  # both are kept busy until all calls are queued
        with torch.cuda.stream(stream):
            torch.mm(busy, busy)
    answers: list[list[torch.Tensor]] = [[], []]
    for _ in range(6):
        for place, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                answers[place].append(pa.attention(*pair[place].tensors, backend=backend, **shared))
    torch.cuda.synchronize()
    for want, got in zip(alone, answers, strict=True):
        for out in got:
            torch.testing.assert_close(out, want, atol=1e-2, rtol=1e-2)


@pytest.fixture
def second() -> torch.device:
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two devices are needed, {torch.cuda.device_count()} is here")
    return torch.device("cuda:1")


@every_backend
@every_structure
def test_a_structure_and_a_process_serve_several_devices(backend: Name, make: Make, second: torch.device) -> None:
    """The other device is not the current one, and the structure was made for no device or for the first."""
    first = make(dtype_of(backend), 0)
    here = attend(backend, *first.tensors, **first.given)
    assert torch.cuda.current_device() == 0
    there = [tensor.to(second) for tensor in first.tensors]
    out = pa.attention(*there, backend=backend, **first.given)
    assert out.device == second
    assert torch.cuda.current_device() == 0
    torch.testing.assert_close(out.to(here.device), here, atol=1e-2, rtol=1e-2)


def test_tensors_of_two_devices_are_refused(second: torch.device) -> None:
    q = drawn(1, 8, 2, 64)
    with pytest.raises(ValueError, match="device"):
        pa.attention(q, q.to(second), q.to(second))
