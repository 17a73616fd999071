"""BreakableGraph on recorded graphs: replays are the module, calls that must stay eager do, and misuse is told."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.graphs import BreakableGraph, breakable, segments
from polyattn.recorders import recorders, recording
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
        return {"last": x, "mean": (x.mean(), "name"), "size": x.shape}


class Answer:
    """What pytree does not look into."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


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


def test_a_padding_that_the_module_states_queries_of_is_the_one_that_was_brought() -> None:
    """`with_queries` answers the same object each time."""

    def model(x: torch.Tensor, padding: Any) -> torch.Tensor:
        q = x.unflatten(-1, (HEADS, HEAD_DIM))
        return pa.attention(q, q, q, structure=padding.with_queries("all")) + pa.attention(q, q, q, structure=padding)

    graph = BreakableGraph(model)
    for lengths, queries in (([5, 3], "all"), ([2, 5], "same"), ([3, 1], None), ([2, 2], "same")):
        x, padding = rows(2, 5), pa.KeyPadding.from_lengths(lengths, 5, queries=queries)
        torch.testing.assert_close(graph(x, padding), model(x, padding))
    assert graph.breaks == [2, 2, 2]


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


def test_a_packed_that_comes_again_brings_its_own_lengths_and_keeps_them() -> None:
    def model(x: torch.Tensor, structure: Any) -> torch.Tensor:
        return x * (torch.arange(8) < structure.cu_q[-1]).unsqueeze(1)

    graph = BreakableGraph(model)
    first, second = (pa.Packed.from_lengths(lengths, capacity=(2, 5)) for lengths in ([5, 3], [1]))
    for structure in (first, second, first):
        x = rows(8)
        assert torch.equal(graph(x, structure), model(x, structure))
    assert first.lengths_q == (5, 3)
    first.update_([2, 1])
    assert torch.equal(graph(x, first), model(x, first))
    assert graph.breaks == [0]


def test_one_argument_in_two_places_is_not_two_arguments() -> None:
    def model(x: torch.Tensor, y: torch.Tensor, one: Any, other: Any) -> torch.Tensor:
        q = (x + 2 * y).unflatten(-1, (HEADS, HEAD_DIM))
        return pa.attention(q, q, q, structure=one) + 2 * pa.attention(q, q, q, structure=other)

    graph = BreakableGraph(model)
    x, one = rows(1, 4), pa.KeyPadding.from_lengths([3], 4)
    torch.testing.assert_close(graph(x, x, one, one), model(x, x, one, one))
    y, other = rows(1, 4), pa.KeyPadding.from_lengths([2], 4)
    torch.testing.assert_close(graph(x, y, one, other), model(x, y, one, other))
    torch.testing.assert_close(graph(y, x, other, one), model(y, x, other, one))
    assert graph.breaks == [2, 2]


def test_calls_that_follow_each_other_have_an_empty_graph_between_them() -> None:
    """Of which torch warns, and warnings are errors here."""

    def model(x: torch.Tensor, structure: Any) -> torch.Tensor:
        return pa.attention(*[pa.attention(x, x, x, structure=structure)] * 3, structure=structure)

    graph = BreakableGraph(model)
    for length in (4, 2):
        x, structure = torch.randn(1, 4, HEADS, HEAD_DIM), pa.KeyPadding.from_lengths([length], 4)
        torch.testing.assert_close(graph(x, structure), model(x, structure))
    assert graph.breaks == [2]


def test_what_changes_the_work_is_part_of_the_signature() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(0.999))
    graph, x = BreakableGraph(model), rows(64)
    model.eval()
    assert torch.equal(graph(x), model(x))
    model.train()
    assert (graph(x) == 0).float().mean() > 0.9
    model.eval()
    with torch.inference_mode():
        assert graph(x).is_inference()
    assert torch.equal(graph(x), model(x))


def test_autocasts_copies_of_weights_are_made_in_the_graph() -> None:
    """The caller's scope frees those that it keeps."""
    kept: list[bool] = []
    model = torch.nn.Linear(WIDTH, WIDTH)

    def watched(x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.is_autocast_cache_enabled())
        return model(x)

    graph = BreakableGraph(watched)
    with torch.autocast("cpu", torch.bfloat16):
        x = rows(4)
        torch.testing.assert_close(graph(x), model(x))
        assert torch.is_autocast_cache_enabled()
    assert kept == [False, False]


def test_threads_take_turns() -> None:
    model = Model(1)
    graph = BreakableGraph(model)
    graph(rows(1, 4))
    wrong: list[Any] = []

    def serve() -> None:
        with torch.no_grad():
            for _ in range(30):
                x = rows(1, 4)
                if not torch.allclose(graph(x)["last"], model(x)["last"], atol=1e-5):
                    wrong.append(x)

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


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


def test_a_module_that_writes_into_its_argument_answers_right_from_the_first_call() -> None:
    def model(x: torch.Tensor, padding: Any = None) -> torch.Tensor:
        q = x.mul_(2).unflatten(-1, (HEADS, HEAD_DIM))
        return x.add_(pa.attention(q, q, q, structure=padding).flatten(-2)).clone()

    graph = BreakableGraph(model)
    for given in ((), (pa.KeyPadding.from_lengths([3], 4),), ()):
        x = rows(1, 4)
        torch.testing.assert_close(graph(x, *given), model(x.clone(), *given))


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


def test_lengths_that_are_routed_in_another_way_are_no_other_signature() -> None:
    """One sample's padding is a prefix of its keys, or nothing."""
    model = Model()
    graph = BreakableGraph(model, entries=1)
    for length in (5, 3, 1):
        compare(graph, model, rows(1, 5), pa.KeyPadding.from_lengths([length], 5))
    assert graph.breaks == [3]


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


def test_a_call_less_than_in_the_warm_up_is_refused() -> None:
    """As of a module that keeps what it computed."""
    kept: list[torch.Tensor] = []

    def model(x: torch.Tensor) -> torch.Tensor:
        q = x.unflatten(-1, (HEADS, HEAD_DIM))
        if not kept:
            kept.append(pa.attention(q, q, q))
        return kept[0]

    with pytest.raises(pa.UnsupportedRequest, match="made 1 attention calls when it was warmed up and makes fewer"):
        BreakableGraph(model)(rows(1, 4))


def test_compiled_code_may_not_take_what_each_replay_would_bring() -> None:
    block = torch.compile(Block(by_layer=True), backend="eager", fullgraph=True)
    x, brought, constant = rows(2, 5), pa.KeyPadding.from_lengths([2, 5], 5), pa.KeyPadding.from_lengths([5, 1], 5)
    want = block(x, constant)
    # no graph is recorded here: what is compiled does not run under a mode
    capturing = segments.Capturing(CpuGraphs(x.device), [], [brought], lambda stated: False)
    with recording(capturing):
        assert torch.equal(block(x, constant), want)
        with pytest.raises(pa.UnsupportedRequest, match="inside compiled code takes a KeyPadding that each replay"):
            block(x, brought)


def test_an_error_of_a_call_between_graphs_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No capture is under way then, and there is none to end."""
    attention = segments.Capturing.attention
    monkeypatch.setattr(segments.Capturing, "attention", lambda self, call, *rest: attention(self, _failing, *rest))
    graph = BreakableGraph(Model())
    with pytest.raises(KeyError, match="mine"):
        graph(rows(2, 5), pa.KeyPadding.from_lengths([5, 3], 5))
    assert graph.breaks == []


def _failing(*args: Any, **kwargs: Any) -> Any:
    raise KeyError("mine")


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
    with pytest.raises(pa.UnsupportedRequest, match="arguments lie on cpu, meta"):
        BreakableGraph(lambda x, y: x)(rows(1, 4), torch.ones(1, device="meta"))
    with pytest.raises(pa.UnsupportedRequest, match="answers a Answer"):
        BreakableGraph(Answer)(rows(1, 4))
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
