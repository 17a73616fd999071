"""No hidden copies of q, k or v, and nothing uninitialised in an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import (
    DEVICE,
    Name,
    assert_right,
    attend,
    dtype_of,
    every_backend,
    poison,
    qkv,
    takes,
)

pytestmark = pytest.mark.cuda

#: Beside the output and its LSE: boundaries, a scheduler's counters.
SMALL = 2 << 20
ROWS, HEADS, DIM = 4096, 24, 128


class Large(NamedTuple):
    """A call whose q alone takes 24 MiB a sample."""

    rows: tuple[int, ...]
    given: Callable[[], dict[str, Any]]


LARGE = {
    "dense": Large((1, ROWS), dict),
    "dense_causal": Large((1, ROWS), lambda: {"causal": True}),
    "packed": Large((ROWS,), lambda: {"structure": pa.Packed.from_lengths([2500, 1500, 96])}),
    "packed_equal": Large((ROWS,), lambda: {"structure": pa.Packed.from_lengths([1024] * 4)}),
    "real_and_pad": Large((ROWS,), lambda: {"structure": pa.Packed.real_and_pad(3900, ROWS)}),
    "one_prefix": Large((2, ROWS), lambda: {"structure": pa.KeyPadding.from_lengths([3900, 3900], ROWS)}),
    "prefixes": Large((2, ROWS), lambda: {"structure": pa.KeyPadding.from_lengths([ROWS, 3700], ROWS)}),
    "prefixes_on_device": Large(
        (2, ROWS), lambda: {"structure": pa.KeyPadding.from_lengths(torch.tensor([ROWS, 3700], device=DEVICE), ROWS)}
    ),
    "spans": Large((1, ROWS), lambda: {"structure": pa.Spans([[(1024, 2048), (3072, 4096)]])}),
}


def largest_beside(call: Callable[[], Any]) -> tuple[Any, int]:
    """What the call gives, and the most bytes that it held at once."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("backend", [None, "fa3"], ids=["auto", "fa3"])
def test_a_call_holds_its_output_and_little_else(backend: Name, name: str) -> None:
    rows, given = LARGE[name]
    q, k, v = qkv(rows, heads=HEADS, dim=DIM)
    arguments = given()
    attend(backend, q, k, v, **arguments)
    out, most = largest_beside(lambda: pa.attention(q, k, v, backend=backend, **arguments))
    lse = 4 * q.numel() // DIM
    assert most <= out.numel() * out.element_size() + lse + SMALL
    buffer = torch.empty_like(out)
    _, most = largest_beside(lambda: pa.attention(q, k, v, out=buffer, backend=backend, **arguments))
    assert most <= lse + SMALL
    assert torch.equal(buffer, out)


BEHIND = {
    "packed": lambda: pa.Packed.from_lengths([200, 3, 90]),
    "boundaries on the device": lambda: pa.Packed.from_cu_seqlens(
        torch.tensor([0, 200, 203, 293], device=DEVICE), max_q=200
    ),
    "capacity": lambda: pa.Packed.from_lengths([200, 3, 90], capacity=(6, 300)),
    "no document": lambda: pa.Packed.from_lengths([]),
}


@every_backend
@pytest.mark.parametrize("lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("name", BEHIND)
def test_rows_beyond_the_last_document_are_zero_whatever_the_allocator_hands_out(
    backend: Name, name: str, lse: bool
) -> None:
    q, k, v = qkv((500,), dtype=dtype_of(backend))
    structure = BEHIND[name]()
    used = sum(structure.lengths_q) if structure.lengths_q is not None else 293
    for rows in (k, v):
        rows[used:] = float("nan")
    attend(backend, q, k, v, structure=structure, return_lse=lse)
    poison(q, torch.empty(8, 500, device=q.device))
    answer = pa.attention(q, k, v, structure=structure, return_lse=lse, backend=backend)
    out = answer[0] if lse else answer
    assert out[used:].eq(0).all()
    assert_right(out, q, k, v, structure=structure)
    if lse:
        assert answer[1][:, used:].isneginf().all()
        assert answer[1][:, :used].isfinite().all()


@every_backend
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_padded_rows_are_zero_whatever_the_allocator_hands_out(backend: Name, on_device: bool) -> None:
    q, k, v = qkv((3, 300), dtype=dtype_of(backend))
    lengths = [300, 0, 177]
    for row, length in enumerate(lengths):
        for tensor in (q, k, v):
            tensor[row, length:] = float("nan")
    given = torch.tensor(lengths, device=DEVICE) if on_device else lengths
    structure = pa.KeyPadding.from_lengths(given, 300)
    attend(backend, q, k, v, structure=structure)
    poison(q)
    out = pa.attention(q, k, v, structure=structure, backend=backend)
    assert_right(out, q, k, v, structure=structure)


@takes("out")
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
def test_a_callers_buffer_serves_all_segments_of_spans(backend: Name, strided: bool) -> None:
    q, k, v = qkv((2, 300), dtype=dtype_of(backend))
    wide = torch.full((2, 300, 2 * 8, 128), float("nan"), dtype=q.dtype, device=q.device)
    buffer = wide[:, :, ::2] if strided else wide[:, :, :8].contiguous()
    spans = pa.Spans([[(100, 200), (230, 260)], [(0, 129)]])
    out = attend(backend, q, k, v, structure=spans, out=buffer)
    assert out is buffer
    assert_right(out, q, k, v, structure=spans)
    assert not strided or wide[:, :, 1::2].isnan().all()


@every_backend
def test_inputs_are_as_they_were(backend: Name) -> None:
    q, k, v = qkv((2, 300), dtype=dtype_of(backend))
    before = [tensor.clone() for tensor in (q, k, v)]
    attend(backend, q, k, v, structure=pa.KeyPadding.from_lengths([300, 177], 300))
    assert all(torch.equal(one, other) for one, other in zip(before, (q, k, v), strict=True))
