"""CUDA graphs: captured once, replayed on other numbers and lengths; the clear error where nothing was ready."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import DEVICE, Name, assert_right, attend, dtype_of, qkv, skip_refused, takes
from platforms.cuda.tests.on_device.structures import STRUCTURES, Made, every_structure

pytestmark = pytest.mark.cuda

Make = Callable[[torch.dtype, int], Made]


def captured(backend: Name, made: Made) -> tuple[torch.Tensor, Callable[[], None]]:
    """The output that a graph writes, and what replays the graph; the structure was sent and the call made before."""
    structure = made.given.get("structure")
    if structure is not None:
        structure.to(DEVICE)
    attend(backend, *made.tensors, **made.given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    refused = None
    with torch.cuda.graph(graph):
        try:
            out = pa.attention(*made.tensors, backend=backend, **made.given)
        except pa.UnsupportedRequest as refusal:
            refused = refusal
            torch.zeros(1, device=DEVICE)  # an empty graph would be warned of
    if refused is not None:
        skip_refused(backend, refused)
    return out, graph.replay


def renew(made: Made, other: Made) -> None:
    """Other numbers where the graph reads."""
    for mine, new in zip(made.tensors, other.tensors, strict=True):
        mine.copy_(new)


@takes("capture")
@every_structure
def test_a_replay_answers_for_the_numbers_that_are_there_then(backend: Name, make: Make) -> None:
    made = make(dtype_of(backend), 0)
    out, replay = captured(backend, made)
    for seed in (1, 2):
        renew(made, make(dtype_of(backend), seed))
        out.fill_(float("nan"))
        replay()
        assert_right(out, *made.tensors, **made.given)


@takes("capture")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_documents_change_their_lengths_between_replays(backend: Name, causal: bool) -> None:
    documents = pa.Packed.from_lengths([200, 3, 250], capacity=(5, 400))
    made = Made(*qkv((700,), dtype=dtype_of(backend)), {"structure": documents, "causal": causal})
    out, replay = captured(backend, made)
    for seed, lengths in enumerate(([400, 300], [1, 1, 1, 1, 1], [200, 3, 250], [0, 399, 0, 129, 7], [])):
        documents.update_(lengths)
        renew(made, Made(*qkv((700,), dtype=dtype_of(backend), seed=seed), {}))
        for rows in (made.k, made.v):
            rows[sum(lengths) :] = float("nan")
        out.fill_(float("nan"))
        replay()
        assert_right(out, *made.tensors, **made.given)


@takes("capture")
def test_pages_and_lengths_change_between_replays(backend: Name) -> None:
    made = STRUCTURES["paged_on_device"](dtype_of(backend), 0)
    pages = made.given["structure"]
    out, replay = captured(backend, made)
    for table, lengths in (([[7, 3, 5], [1, 2, 6]], [192, 129]), ([[0, -1, -1], [3, 99, -7]], [1, 190])):
        pages.block_table.copy_(torch.tensor(table))
        pages.kv_lengths.copy_(torch.tensor(lengths))
        out.fill_(float("nan"))
        replay()
        assert_right(out, *made.tensors, **made.given)


@pytest.mark.parametrize("name", [name for name in STRUCTURES if name != "dense"])
def test_a_first_use_inside_a_capture_raises_and_names_the_way_out(name: str) -> None:
    made = STRUCTURES[name](torch.bfloat16, 0)
    graph = torch.cuda.CUDAGraph()
    told: Any = None
    with torch.cuda.graph(graph):
        try:
            pa.attention(*made.tensors, **made.given)
        except RuntimeError as error:
            told = str(error)
        torch.zeros(1, device=DEVICE)
    assert told is not None
    assert "structure.to('cuda:0')" in told or "structure.to(" in told
    assert_right(pa.attention(*made.tensors, **made.given), *made.tensors, **made.given)


def test_a_graph_and_eager_calls_of_one_structure_do_not_disturb_each_other() -> None:
    made = STRUCTURES["packed"](torch.bfloat16, 0)
    out, replay = captured(None, made)
    other = STRUCTURES["packed"](torch.bfloat16, 5)
    for _ in range(3):
        eager = pa.attention(*other.tensors, structure=made.given["structure"])
        replay()
    assert_right(eager, *other.tensors, structure=made.given["structure"])
    assert_right(out, *made.tensors, **made.given)
