"""BreakableGraph on the device: replays are the module, memory is shared, and no call of the module is made again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import DEVICE
from polyattn.graphs import BreakableGraph

pytestmark = pytest.mark.cuda
HEADS, HEAD_DIM, ROWS = 4, 64, 300
WIDTH = HEADS * HEAD_DIM


class Model(torch.nn.Module):
    """Attention layers with residuals; counts how often its forward runs."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.mix = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(layers))
        self.attend = pa.Attention(HEADS, HEAD_DIM)
        self.runs = 0

    def forward(self, x: torch.Tensor, structure: Any = None) -> tuple[torch.Tensor, torch.Tensor]:
        """x [B,S,WIDTH] or [T,WIDTH] -> the last layer's rows, and their sum."""
        self.runs += 1
        for mix in self.mix:
            q, k, v = mix(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
            x = x + self.attend(q, k, v, structure).flatten(-2)
        return x, x.sum(-1)


@pytest.fixture(autouse=True)
def _inference() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def model(layers: int = 4) -> Model:
    return Model(layers).to(DEVICE, torch.bfloat16)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, device=DEVICE, dtype=torch.bfloat16)


def same(
    graph: BreakableGraph, model: Model, x: torch.Tensor, structure: Any = None, *, upto: int | None = None
) -> None:
    got, want = graph(x, structure), model(x, structure)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine[:upto], theirs[:upto], atol=0.1, rtol=0.02)


def test_a_dense_model_is_one_graph_and_its_forward_is_not_run_again() -> None:
    it = model()
    graph = BreakableGraph(it)
    graph(rows(2, ROWS), None)
    runs = it.runs
    for _ in range(3):
        graph(rows(2, ROWS), None)
    assert it.runs == runs
    same(graph, it, rows(2, ROWS))
    assert graph.breaks == [0]


def test_paddings_are_brought_by_each_replay() -> None:
    it = model()
    graph = BreakableGraph(it)
    for lengths in ([300, 200], [17, 299], [150, 151], [1, 300]):
        same(graph, it, rows(2, ROWS), pa.KeyPadding.from_lengths(lengths, ROWS))
    assert graph.breaks == [4]


def test_documents_with_capacity_stay_in_the_graph() -> None:
    it = model()
    graph = BreakableGraph(it)
    for lengths in ([200, 100], [1, 299], [5, 6, 7]):
        same(graph, it, rows(ROWS), pa.Packed.from_lengths(lengths, capacity=(3, ROWS)), upto=sum(lengths))
    assert graph.breaks == [0]


def test_lengths_are_those_of_the_structure_that_is_brought() -> None:
    it = model()
    graph = BreakableGraph(it)
    first, second = (pa.Packed.from_lengths(lengths, capacity=(2, ROWS)) for lengths in ([200, 100], [1, 299]))
    for structure in (first, second, first):
        same(graph, it, rows(ROWS), structure)
    assert graph.breaks == [0]


def test_calls_that_follow_each_other_or_end_the_module_have_nothing_between_them() -> None:
    def twice(x: torch.Tensor, structure: Any) -> torch.Tensor:
        return pa.attention(*[pa.attention(x, x, x, structure=structure)] * 3, structure=structure)

    graph = BreakableGraph(twice)
    for lengths in ([300, 200], [17, 299]):
        x, structure = rows(2, ROWS).unflatten(-1, (HEADS, HEAD_DIM)), pa.KeyPadding.from_lengths(lengths, ROWS)
        torch.testing.assert_close(graph(x, structure), twice(x, structure), atol=0.02, rtol=0.02)
    assert graph.breaks == [2]


def test_casts_of_autocast_outlive_its_scope() -> None:
    """Its own copies of the weights are freed at the scope's end, and their memory is somebody else's then."""
    it = Model(4).to(DEVICE)
    graph = BreakableGraph(it)
    for _ in range(3):
        x = torch.randn(2, ROWS, WIDTH, device=DEVICE)
        with torch.autocast("cuda", torch.bfloat16):
            it(x)  # leaves copies of the weights behind
            got = graph(x)
            want = it(x)
        noise = [torch.full((WIDTH, 3 * WIDTH), float("nan"), device=DEVICE, dtype=torch.bfloat16) for _ in range(30)]
        del noise
        torch.testing.assert_close(got[0], want[0], atol=0.1, rtol=0.02)


def test_an_error_in_the_capture_is_the_modules_own_and_the_next_one_is_captured() -> None:
    def model(x: torch.Tensor, structure: Any) -> torch.Tensor:
        return pa.attention(x * 2, x, x, structure=structure) * 2

    x = rows(2, ROWS).unflatten(-1, (HEADS, HEAD_DIM))
    structure = pa.KeyPadding.from_lengths([300, 200], ROWS)
    with pytest.raises(KeyError, match="mine"):
        BreakableGraph(_failing_when_captured())(x, structure)
    graph = BreakableGraph(model)
    for _ in range(2):
        torch.testing.assert_close(graph(x, structure), model(x, structure), atol=0.02, rtol=0.02)


def _failing_when_captured() -> Any:
    runs: list[int] = []

    def module(x: torch.Tensor, structure: Any) -> torch.Tensor:
        runs.append(1)
        x = pa.attention(x * 2, x, x, structure=structure) * 2
        if len(runs) == 2:
            raise KeyError("mine")
        return x

    return module


def test_calls_kept_out_by_name_agree_with_the_whole_graph() -> None:
    it = model()
    whole, broken = BreakableGraph(it), BreakableGraph(it, eager=lambda stated: True)
    for _ in range(3):
        x = rows(2, ROWS)
        for mine, theirs in zip(whole(x), broken(x), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert (whole.breaks, broken.breaks) == ([0], [4])


def test_replays_survive_what_other_work_does_to_the_allocator() -> None:
    """Rows between graphs are known by address: nobody else may be given that memory."""
    it = model(8)
    graph = BreakableGraph(it)
    padding = pa.KeyPadding.from_lengths([250, 30], ROWS)
    graph(rows(2, ROWS), padding)
    for _ in range(20):
        noise = [torch.full((2, ROWS, WIDTH), float("nan"), device=DEVICE, dtype=torch.bfloat16) for _ in range(30)]
        same(graph, it, rows(2, ROWS), padding)
        del noise
    torch.cuda.empty_cache()
    same(graph, it, rows(2, ROWS), padding)


def test_breaks_cost_no_memory_a_layer() -> None:
    """A pool that kept each call's rows would grow with the layers by q, k, v and the answer of each."""

    def taken(layers: int) -> int:
        it = model(layers)
        graph = BreakableGraph(it, eager=lambda stated: True)
        torch.cuda.synchronize()
        before = torch.cuda.memory_reserved()
        graph(rows(2, 4096))
        torch.cuda.synchronize()
        return torch.cuda.memory_reserved() - before

    one = 2 * 4096 * WIDTH * 2
    taken(2)  # workspaces
    assert taken(24) - taken(4) < 20 * one, "less than one tensor a layer"
