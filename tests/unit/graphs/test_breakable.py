"""BreakableGraph on recorded graphs: replays are the module, calls that must stay eager do, and misuse is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.graphs import BreakableGraph, breakable, segments
from polyattn.recorders import recorders
from tests.unit.graphs.recorded import CpuGraphs

HEADS, HEAD_DIM = 2, 8
WIDTH = HEADS * HEAD_DIM


class Block(torch.nn.Module):
    """Attention with a residual, by a layer or by the function."""

    def __init__(self, by_layer: bool, **asked: Any) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.attend = pa.Attention(HEADS, HEAD_DIM, **asked) if by_layer else pa.attention

    def forward(self, x: torch.Tensor, structure: Any = None, **more: Any) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, HEAD_DIM)).unbind(-3)
        answer = self.attend(q, k, v, structure=structure, **more)
        out = answer
        if isinstance(answer, tuple):  # a padded row's LSE is -inf
            out = answer[0] + answer[1].exp().clamp(max=1).transpose(-1, -2).unsqueeze(-1)
        return x + self.out(out.flatten(-2))


class Model(torch.nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block(by_layer=number % 2 == 0) for number in range(layers))

    def forward(self, x: torch.Tensor, structure: Any = None, **more: Any) -> Any:
        for block in self.blocks:
            x = block(x, structure, **more)
        return {"last": x, "mean": (x.mean(), "name")}


@pytest.fixture(autouse=True)
def _recorded(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(breakable, "GraphDevice", CpuGraphs)
    monkeypatch.setattr(segments, "_may_be_captured", lambda route: "blocked" not in route.name)
    torch.manual_seed(0)
    with torch.no_grad():
        yield
    assert not recorders


def compare(graph: BreakableGraph, model: Any, *args: Any, **kwargs: Any) -> None:
    got, want = graph(*args, **kwargs), model(*args, **kwargs)
    torch.testing.assert_close(got["last"], want["last"])
    torch.testing.assert_close(got["mean"][0], want["mean"][0])
    assert got["mean"][1] == "name"


def rows(*lengths: int, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(*lengths, width)


@pytest.mark.parametrize("lse", [False, True])
def test_each_replay_brings_its_own_structure_between_the_graphs(lse: bool) -> None:
    model = Model()
    graph = BreakableGraph(model)
    for lengths in ([5, 3], [2, 5], [1, 4], [5, 3]):
        compare(graph, model, rows(2, 5), pa.KeyPadding.from_lengths(lengths, 5), return_lse=lse)
    assert graph.breaks == [3]


def test_without_a_reason_the_whole_forward_is_one_graph() -> None:
    model = Model()
    graph = BreakableGraph(model)
    for _ in range(3):
        compare(graph, model, rows(2, 5))
    assert graph.breaks == [0]


def test_lengths_that_are_brought_are_written_into_a_packed_with_capacity() -> None:
    """Slots that may be captured read the boundaries from the device, as this module does."""

    def model(x: torch.Tensor, structure: Any) -> torch.Tensor:
        return x * (torch.arange(8) < structure.cu_q[-1]).unsqueeze(1)

    graph = BreakableGraph(model)
    for lengths in ([5, 3], [2, 5], [1]):
        x, structure = rows(8), pa.Packed.from_lengths(lengths, capacity=(2, 5))
        assert torch.equal(graph(x, structure), model(x, structure))
    assert graph.breaks == [0]


def test_calls_that_eager_names_stay_out() -> None:
    model = Model()
    graph = BreakableGraph(model, eager=lambda stated: "num_heads" in stated)
    for _ in range(2):
        compare(graph, model, rows(1, 4))
    assert graph.breaks == [2], "the layers, not the function"


def test_a_gate_is_read_anew_in_each_replay() -> None:
    tiles = pa.VideoTiles(pa.VideoLayout((2, 4, 4)), (2, 2, 2), topk=1)

    def model(x: torch.Tensor, weight: torch.Tensor, structure: Any) -> torch.Tensor:
        q = x.unflatten(-1, (HEADS, HEAD_DIM)) * 2
        return pa.attention(q, q, q, structure=structure, gate=weight * 0.5)

    graph = BreakableGraph(model)
    for _ in range(3):
        x, weight = rows(1, 32), torch.randn(1, 32, HEADS, HEAD_DIM)
        torch.testing.assert_close(graph(x, weight, tiles), model(x, weight, tiles))
    assert graph.breaks == [1]


def test_a_buffer_of_the_module_is_written_in_place() -> None:
    buffer = torch.zeros(1, 4, HEADS, HEAD_DIM)

    def model(x: torch.Tensor, padding: Any) -> torch.Tensor:
        q = x.unflatten(-1, (HEADS, HEAD_DIM))
        pa.attention(q, q, q, structure=padding, out=buffer)
        return buffer * 2

    graph = BreakableGraph(model)
    for length in (4, 2, 3):
        x, padding = rows(1, 4), pa.KeyPadding.from_lengths([length], 4)
        got = graph(x, padding)
        torch.testing.assert_close(got, buffer * 2)
        torch.testing.assert_close(got, model(x, padding))


def test_answers_are_the_callers_own_and_inputs_are_left_alone() -> None:
    model = Model()
    graph = BreakableGraph(model)
    x = rows(1, 4)
    kept = x.clone()
    first = graph(x)["last"]
    seen = first.clone()
    graph(rows(1, 4))
    assert torch.equal(first, seen)
    assert torch.equal(x, kept)


def test_each_signature_has_graphs_of_its_own_and_the_last_ones_are_refused() -> None:
    model = Model()
    graph = BreakableGraph(model, entries=2)
    compare(graph, model, rows(1, 4))
    compare(graph, model, rows(1, 5))
    with pytest.warns(pa.PolyattnWarning, match="2 signatures are captured"):
        compare(graph, model, rows(1, 6))
    compare(graph, model, rows(1, 7))  # said once
    compare(graph, model, rows(1, 5))
    assert graph.breaks == [0, 0]


def test_a_scoped_choice_is_part_of_the_signature() -> None:
    model = Model()
    graph = BreakableGraph(model)
    compare(graph, model, rows(1, 4))
    with pa.use_backend("blocked"):
        compare(graph, model, rows(1, 4))
    assert graph.breaks == [0, 3], "that backend's slots are not for graphs"


def test_gradients_run_eagerly_and_that_is_said() -> None:
    model = Model()
    graph = BreakableGraph(model)
    with torch.enable_grad(), pytest.warns(pa.PolyattnWarning, match="gradients are enabled"):
        assert graph(rows(1, 4))["last"].requires_grad
    assert graph.breaks == []


def test_a_structure_made_inside_is_refused() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (HEADS, HEAD_DIM))
        return pa.attention(q, q, q, structure=pa.KeyPadding.from_lengths([2], 4))

    with pytest.raises(pa.UnsupportedRequest, match="KeyPadding made inside the module"):
        BreakableGraph(model)(rows(1, 4))


def test_a_structure_that_the_module_keeps_is_constant() -> None:
    kept = pa.KeyPadding.from_lengths([2], 4)
    model = Model()

    def keeping(x: torch.Tensor) -> Any:
        return model(x, kept)

    graph = BreakableGraph(keeping)
    for _ in range(2):
        compare(graph, keeping, rows(1, 4))


def test_a_call_more_than_in_the_warm_up_is_refused() -> None:
    calls: list[int] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        q = x.unflatten(-1, (HEADS, HEAD_DIM))
        for _ in calls:
            q = pa.attention(q, q, q)
        return q

    with pytest.raises(pa.UnsupportedRequest, match="made 1 attention calls"):
        BreakableGraph(model)(rows(1, 4))


def test_an_error_of_the_module_passes_and_leaves_nothing() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        raise KeyError("mine")

    graph = BreakableGraph(model)
    with pytest.raises(KeyError, match="mine"):
        graph(rows(1, 4))
    assert graph.breaks == []


def test_arguments_that_can_change_unseen_are_refused() -> None:
    with pytest.raises(pa.UnsupportedRequest, match="type set can change unseen"):
        BreakableGraph(lambda x, names: x)(rows(1, 4), {"a"})
    with pytest.raises(ValueError, match="at least one tensor"):
        BreakableGraph(lambda x: x)(1)
    with pytest.raises(ValueError, match="entries: a positive integer"):
        BreakableGraph(lambda x: x, entries=0)


def test_a_graph_inside_another_is_part_of_it() -> None:
    model = Model()
    inner = BreakableGraph(model)
    outer = BreakableGraph(lambda x: inner(x))
    compare(outer, model, rows(1, 4))
    compare(outer, model, rows(1, 4))
    assert inner.breaks == []
