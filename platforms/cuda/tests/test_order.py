"""The order of backends on an H200 is the one that was measured there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyattn.vendor import Machine, Request, StructureFacts, TensorFacts
from polyattn_cuda.order import order

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
SMALL: dict[str, dict[str, Any]] = json.loads((RESULTS / "small_h200.json").read_text())["comparisons"]
H200 = Machine("cuda", "cuda", arch="sm_90", name="NVIDIA H200")
#: How a benchmark's kind of call is a request: samples, structure, and what else is so.
KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "dense": (1, "dense", {}),
    "in a graph": (1, "dense", {"capturing": True}),
    "two samples, one padded": (2, "key_padding", {}),
    "two documents": (0, "packed", {}),
    "forward and backward": (1, "dense", {"grad": True}),
}


def requested(kind: str, size: list[int]) -> Request:
    samples, structure, facts = KINDS[kind]
    queries, keys, heads, head_dim = size
    batch = (samples,) if samples else ()
    q, k = (TensorFacts.contiguous((*batch, rows, heads, head_dim), "bfloat16") for rows in (queries, keys))
    return Request(q, k, k, device="cuda:0", structure_kind=structure, **facts)


@pytest.mark.parametrize("name", SMALL)
def test_the_first_one_asked_is_nearly_the_fastest_that_was_measured(name: str) -> None:
    found = SMALL[name]
    times = {backend: ms for backend, ms in found["milliseconds"].items() if backend != "automatic"}
    first = next(one for one in order(requested(found["kind"], found["size"]), H200) if one in times)
    assert times[first] <= 1.2 * min(times.values()), times


def test_every_kind_of_call_was_measured() -> None:
    assert {found["kind"] for found in SMALL.values()} == set(KINDS)


@pytest.mark.parametrize(
    "facts",
    [
        {"structure_kind": "mask", "structure_facts": StructureFacts(mask_shape=(1, 1, 1, 64), mask_dtype="bool")},
        {"grad": True, "window": (3, 3)},
        {"grad": True, "softcap": 5.0},
        {"structure_kind": "packed", "capturing": True},
    ],
    ids=["mask", "window with gradients", "softcap with gradients", "packed in a graph"],
)
def test_what_was_not_measured_has_the_order_of_large_calls(facts: dict[str, Any]) -> None:
    q = TensorFacts.contiguous((1, 64, 2, 64), "bfloat16")
    assert order(Request(q, q, q, **facts), H200)[0] == "fa3"


def test_causal_gradients_off_the_square_do_not_go_to_sdpa_which_would_need_a_mask() -> None:
    q, k = (TensorFacts.contiguous((1, rows, 2, 64), "bfloat16") for rows in (32, 64))
    assert order(Request(q, k, k, grad=True, causal=True), H200)[0] == "fa3"
    assert order(Request(k, k, k, grad=True, causal=True), H200)[0] == "sdpa"


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120", ""])
@pytest.mark.parametrize("grad", [False, True])
def test_small_calls_have_the_same_backends_as_large_ones(arch: str, grad: bool) -> None:
    machine = Machine("cuda", "cuda", arch=arch)
    small, large = (TensorFacts.contiguous((1, rows, 4, 64), "bfloat16") for rows in (64, 1 << 16))
    names = [order(Request(q, q, q, grad=grad), machine) for q in (small, large)]
    assert sorted(names[0]) == sorted(names[1])
    assert len(set(names[0])) == len(names[0])
