"""Quantised attention on the device: layers and steps that are left out, rotation, and how far answers may lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import BACKENDS, assert_right, attend, drawn, exact, qkv
from polyattn.testing.compare import CEILINGS, FLOORS

pytestmark = pytest.mark.cuda

#: (backend, format) of all that is claimed.
CLAIMED = sorted(
    {
        (name, method)
        for name, backend in BACKENDS.items()
        for slot in backend.slots
        for method in slot.features.quant
    }
)  # fmt: skip
every_format = pytest.mark.parametrize(("backend", "method"), CLAIMED, ids=[":".join(pair) for pair in CLAIMED])


def error(out: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the error over that of the answer."""
    return float((out.cpu().double() - want).norm() / want.norm())


def outliers(rows: tuple[int, ...], **kind: Any) -> list[torch.Tensor]:
    """q, k, v of which q and k have a few channels thirty times as large as the others, and opposite."""
    q, k, v = qkv(rows, **kind)
    for tensor in (q, k):
        tensor[..., ::37] *= 30
    return [q * 0.2, k * 0.2, v]


@every_format
def test_an_answer_is_as_near_as_its_format_and_no_nearer(backend: str, method: str) -> None:
    q, k, v = qkv((2, 1000))
    out = attend(backend, q, k, v, quant=method)
    assert FLOORS[method] < error(out, exact(q, k, v)) < CEILINGS[method]


@every_format
def test_errors_of_smooth_and_of_outlying_inputs_with_and_without_rotation(
    backend: str, method: str, record_property: Any
) -> None:
    """The four errors are recorded with the test; rotation must not make any input's much worse."""
    for name, tensors in (("smooth", qkv((1, 1000))), ("outliers", outliers((1, 1000)))):
        want = exact(*tensors)
        turned, plain = (
            error(attend(backend, *tensors, quant=pa.Quant(method, rotate=rotate)), want) for rotate in (True, False)
        )
        record_property(f"{backend} {method} {name}", f"rotated {turned:.4f}, not {plain:.4f}")
        assert turned < max(1.5 * plain, CEILINGS[method])


@pytest.mark.parametrize("backend", [backend for backend, method in CLAIMED if method == "fp8"])
def test_rotation_is_done_only_where_it_is_asked_for(backend: str) -> None:
    q, k, v = qkv((1, 300))
    turned, plain = (attend(backend, q, k, v, quant=pa.Quant("fp8", rotate=rotate)) for rotate in (True, False))
    assert not torch.equal(turned, plain)
    assert torch.equal(turned, attend(backend, q, k, v, quant=pa.Quant("fp8")))


@every_format
def test_layers_that_are_left_out_run_as_they_are_and_say_so(backend: str, method: str) -> None:
    q, k, v = qkv((2, 320))  # whole tiles of 64 keys, which SageAttention 1.x wants of heads of 128
    quant = pa.Quant(method, skip_layers=(0, 2))
    exactly = any(slot.features.exact for slot in BACKENDS[backend].slots)
    choice = backend if exactly else f"{backend},auto"
    routes = []
    for index in range(4):
        layer = pa.Attention(8, 128, quant=quant, backend=choice, prefix=f"blocks.{index}.attn1")
        out = layer(q, k, v)
        notes = " ".join(layer.last_route.notes)
        skipped = index in quant.skip_layers
        assert (f"layer {index} is in skip_layers" in notes) == skipped
        assert layer.last_route.request.quant == (None if skipped else method)
        if skipped:
            assert_right(out, q, k, v)
        else:
            assert FLOORS[method] < error(out, exact(q, k, v)) < CEILINGS[method]
        routes.append(layer.last_route)
    assert routes[1].backend.name == routes[3].backend.name == backend


@every_format
def test_steps_that_are_left_out_run_as_they_are_and_an_unknown_step_is_left_out(backend: str, method: str) -> None:
    q, k, v = qkv((2, 300))
    quant = pa.Quant(method, skip_steps=(0, 3))
    quantised = attend(backend, q, k, v, quant=method)
    for index in range(4):
        with pa.step(index, 4), pa.record_routes() as log:
            out = pa.attention(q, k, v, quant=quant, backend=f"{backend},auto")
        if index in quant.skip_steps:
            assert f"step {index} is in skip_steps" in " ".join(log.entries[0].notes)
            assert_right(out, q, k, v)
        else:
            assert torch.equal(out, quantised)
    with pa.record_routes() as log:
        assert_right(pa.attention(q, k, v, quant=quant, backend=f"{backend},auto"), q, k, v)
    assert "step is unknown" in " ".join(log.entries[0].notes)


@every_format
def test_the_callers_tensors_stay_as_they_are(backend: str, method: str) -> None:
    q, k, v = qkv((2, 300))
    k += 3.0  # a mean that a backend smooths away
    before = [tensor.clone() for tensor in (q, k, v)]
    out = attend(backend, q, k, v, quant=method)
    assert all(torch.equal(one, other) for one, other in zip(before, (q, k, v), strict=True))
    assert error(out, exact(q, k, v)) < 2 * CEILINGS[method]


@every_format
@pytest.mark.parametrize("width", [40, 72, 80, 96, 160, 256])
def test_40_head_sizes_outside_the_list_are_padded_or_refused_with_the_list(
    backend: str, method: str, width: int
) -> None:
    q, k, v = qkv((1, 200), dim=width)
    out = attend(backend, q, k, v, quant=method)
    assert out.shape == v.shape
    assert error(out, exact(q, k, v)) < CEILINGS[method]


@every_format
def test_40_fewer_rows_than_a_block(backend: str, method: str) -> None:
    q, k, v = qkv((1, 14))
    out = attend(backend, q, k, v, quant=method)
    assert out.isfinite().all()
    assert error(out, exact(q, k, v)) < CEILINGS[method]


@every_format
def test_what_nobody_sees_takes_no_part_in_the_scales(backend: str, method: str) -> None:
    q, k, v = qkv((2, 300))
    loud = [tensor.clone() for tensor in (k, v)]
    structure = pa.KeyPadding.from_lengths([300, 177], 300)
    quiet = attend(backend, q, k, v, structure=structure, quant=method)
    for value in (float("nan"), 1e4):
        for tensor in loud:
            tensor[1, 177:] = value
        assert torch.equal(attend(backend, q, *loud, structure=structure, quant=method), quiet)


def test_a_format_that_nobody_has_is_refused_with_those_there_are() -> None:
    q = drawn(1, 300, 8, 128)
    with pytest.raises(pa.UnsupportedRequest, match="mxfp4"):
        pa.attention(q, q, q, quant="mxfp4")
    with pytest.raises(ValueError, match="fp9"):
        pa.attention(q, q, q, quant="fp9")
