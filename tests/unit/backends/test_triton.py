"""The backend `triton`: what it takes and refuses, and that naming it needs no Triton."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from polyattn.backends.triton import triton_backend
from polyattn.kernels.flash_kernel import attend_kernel, marked_kernel
from polyattn.kernels.tiles import chunks, tile_for
from polyattn.vendor import Accepted, Machine, Rejected, Request, StructureFacts, TensorFacts, resolve

MACHINE = Machine("toy", "toy", arch="sm_90", versions={"triton": "3.6.0"})


def _request(head_dim: int = 128, dtype: str = "bfloat16") -> Request:
    facts = TensorFacts.contiguous((1, 8, 2, head_dim), dtype)
    return Request(facts, facts, facts, device="toy:0")


def _reasons(request: Request, machine: Machine = MACHINE) -> tuple[str, ...]:
    (decision,) = resolve(request, machine, [triton_backend()])
    return decision.reasons if isinstance(decision, Rejected) else ()


@pytest.mark.parametrize(
    ("kind", "facts", "slot"),
    [
        ("dense", StructureFacts(), "dense"),
        ("prefix_kv", StructureFacts(common_prefix=4), "prefix_kv"),
        ("key_padding", StructureFacts(host=False, prefix=None), "key_padding"),
        ("packed", StructureFacts(host=False, documents=3), "packed"),
        ("packed", StructureFacts(documents=3, capacity=True), "packed"),
        ("packed", StructureFacts(documents=3, spans=True), "packed"),
        ("spans", StructureFacts(spans=True), "spans"),
        ("paged", StructureFacts(host=False, documents=1, page_size=7, query_layout="batched"), "paged"),
    ],
)
def test_structures_have_a_slot_of_their_own(kind: str, facts: StructureFacts, slot: str) -> None:
    request = replace(
        _request(), structure_kind=kind, structure_facts=facts, causal=True, softcap=2.0, lse=True, out=True,
        capturing=True, deterministic=True,
    )  # fmt: skip
    (decision,) = resolve(request, MACHINE, [triton_backend()])
    assert isinstance(decision, Accepted)
    assert decision.slot.name == slot


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("head_dim", [1, 72, 512])
def test_sizes_taken(head_dim: int, dtype: str) -> None:
    assert _reasons(_request(head_dim, dtype)) == ()


def test_refusals_say_why() -> None:
    assert "gradients" in _reasons(replace(_request(), grad=True))[0]
    assert "513" in _reasons(_request(513))[0]
    assert "float64" in _reasons(_request(dtype="float64"))[0]
    assert "mask" in _reasons(replace(_request(), structure_kind="mask"))[0]
    assert "not installed" in _reasons(_request(), replace(MACHINE, versions={}))[0]
    assert "3.3.1 is older than 3.4" in _reasons(_request(), replace(MACHINE, versions={"triton": "3.3.1"}))[0]


def test_a_platform_may_call_its_triton_otherwise() -> None:
    (decision,) = resolve(
        _request(), replace(MACHINE, versions={"triton-other": "3.5"}), [triton_backend("triton-other")]
    )
    assert isinstance(decision, Accepted)


def test_naming_the_backend_imports_no_triton() -> None:
    code = "import sys; sys.modules['triton'] = None; from polyattn.backends.triton import triton_backend as b; b()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("kernel", [attend_kernel, marked_kernel])
def test_no_number_of_a_call_compiles_the_kernel_anew(kernel: Any) -> None:
    """Triton specialises integers on being 1 or a multiple of 16, unless told not to; floats it never does."""
    floats = {"sign", "inner", "outer"}
    tensors = {"q", "k", "v", "out", "lse", "cu_q", "cu_k", "used_q", "used_k", "keep", "keep_q", "ends", "only_if"}
    numbers = [p for p in kernel.params if not p.is_constexpr and p.name not in floats | tensors]
    assert len(numbers) == 24
    assert all(p.do_not_specialize for p in numbers)


def test_chunks_hold_a_head_dim_and_waste_less_than_a_third() -> None:
    for size in range(1, 513):
        parts = chunks(size)
        assert parts.width >= size
        assert parts.width <= max(32, 1.5 * size), (size, parts)
        assert all(part >= 16 and part & (part - 1) == 0 for part in parts if part), (size, parts)


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_100", "sm_121", "gfx942", "gfx950", "another", ""])
@pytest.mark.parametrize("element_size", [2, 4])
def test_every_architecture_has_a_tile_for_every_head_dim(arch: str, element_size: int) -> None:
    for dim in (1, 64, 65, 128, 256, 512):
        tile = tile_for(arch, dim, 1, element_size)
        assert tile == tile_for(arch, 1, dim, element_size)
        assert all(size >= 16 and size & (size - 1) == 0 for size in (tile.block_m, tile.block_n))
