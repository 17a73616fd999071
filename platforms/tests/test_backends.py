"""What every vendor's portable backends state, and what they compute: they run on any device, here the CPU."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import pytest
import torch

from platforms.tests.vendors import detection_of
from polyattn.vendor import Accepted, Machine, Rejected, Request, TensorFacts, resolve

PORTABLE = ("sdpa", "blocked")


@pytest.fixture
def backends(vendor: str) -> ModuleType:
    return import_module(f"polyattn_{vendor}.backends")


@pytest.fixture
def machine(vendor: str) -> Machine:
    return Machine(vendor, detection_of(vendor).DEVICE_TYPE)


def request_on(machine: Machine, dtype: str, **facts: object) -> Request:
    q = TensorFacts.contiguous((2, 5, 4, 16), dtype)
    k = TensorFacts.contiguous((2, 7, 2, 16), dtype)
    return Request(q, k, k, device=f"{machine.device_type}:0", scale=0.25, **facts)  # type: ignore[arg-type]


def test_the_portable_backends_come_last_and_in_order(backends: ModuleType) -> None:
    assert tuple(backend.name for backend in backends.BACKENDS)[-len(PORTABLE) :] == PORTABLE


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
def test_a_dtype_is_taken_or_named(backends: ModuleType, machine: Machine, dtype: str) -> None:
    for decision in resolve(request_on(machine, dtype), machine, backends.BACKENDS[-len(PORTABLE) :]):
        if dtype in backends.DTYPES:
            assert isinstance(decision, Accepted)
        else:
            assert isinstance(decision, Rejected)
            assert any(dtype in reason for reason in decision.reasons)


@pytest.mark.parametrize("name", PORTABLE)
def test_the_accepted_slot_is_bottom_right_and_gqa(backends: ModuleType, machine: Machine, name: str) -> None:
    (backend,) = (backend for backend in backends.BACKENDS if backend.name == name)
    decision = resolve(request_on(machine, "float32", causal=True), machine, [backend])[0]
    assert isinstance(decision, Accepted)
    module, _, function = decision.slot.call.partition(":")
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 5, 4, 16, generator=generator)
    k, v = (torch.randn(2, 7, 2, 16, generator=generator) for _ in range(2))
    out, lse = getattr(import_module(module), function)(
        q, k, v, None, meta=None, causal=True, scale=0.25, window=None, softcap=0.0, need_lse=False, options=()
    )
    keys, values = (x.repeat_interleave(2, dim=2).double() for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), keys) * 0.25
    hidden = torch.ones(5, 7, dtype=torch.bool).triu(7 - 5 + 1)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, values)
    assert lse is None
    assert torch.allclose(out.double(), expected, atol=backend.tolerances["float32"])
