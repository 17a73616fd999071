"""The backends of Moore Threads MUSA: what they state, and what they compute. They run on any device, here the CPU."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from polyattn.vendor import Accepted, Machine, Rejected, Request, TensorFacts, resolve
from polyattn_musa.backends import BACKENDS, DTYPES

MACHINE = Machine("musa", "musa")


def request_of(dtype: str, **facts: object) -> Request:
    q = TensorFacts.contiguous((2, 5, 4, 16), dtype)
    k = TensorFacts.contiguous((2, 7, 2, 16), dtype)
    return Request(q, k, k, device="musa:0", scale=0.25, **facts)  # type: ignore[arg-type]


def test_names_and_order() -> None:
    assert [backend.name for backend in BACKENDS] == ["sdpa", "blocked"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn"])
def test_a_dtype_is_taken_or_named(dtype: str) -> None:
    for decision in resolve(request_of(dtype), MACHINE, BACKENDS):
        if dtype in DTYPES:
            assert isinstance(decision, Accepted)
        else:
            assert isinstance(decision, Rejected)
            assert any(dtype in reason for reason in decision.reasons)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.name)
def test_the_accepted_slot_is_bottom_right_and_gqa(backend: object) -> None:
    decision = resolve(request_of("float32", causal=True), MACHINE, [backend])[0]  # type: ignore[list-item]
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
    assert torch.allclose(out.double(), expected, atol=backend.tolerances["float32"])  # type: ignore[attr-defined]
