"""torch.compile on the device: one graph, the eager answer and gradients, and fakes whose strides are the real ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import Name, assert_right, attend, drawn, dtype_of, every_backend, qkv, takes
from platforms.cuda.tests.on_device.structures import Made, every_structure

pytestmark = pytest.mark.cuda

Make = Callable[[torch.dtype, int], Made]


@pytest.fixture(autouse=True)
def graphs_of_its_own() -> None:
    torch.compiler.reset()


class Shapes:
    """A compiler that runs the graph as it is and keeps what the tracer expects of its outputs."""

    def __init__(self) -> None:
        self.expected: list[tuple[torch.Size, tuple[int, ...], torch.dtype]] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        fakes = [node.meta["example_value"] for node in output.args[0]]
        self.expected = [(fake.shape, fake.stride(), fake.dtype) for fake in fakes]
        return graph.forward


def compiled(backend: Name, made: Made, compiler: Any, **given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The call in one graph, with its LSE, beside another operation; the backend takes it eagerly."""
    attend(backend, *made.tensors, **made.given, return_lse=True, **given)

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return pa.attention(q * 1.0, k, v, backend=backend, return_lse=True, **made.given, **given)

    graph = torch.compile(call, fullgraph=True, backend=compiler, dynamic=False)
    with pa.record_routes() as log:
        answer = graph(*made.tensors)
    assert all(backend in entry.route for entry in log.entries if backend is not None)
    return answer


@every_backend
@every_structure
def test_a_graph_gives_the_eager_answer_and_its_fakes_have_the_real_strides(backend: Name, make: Make) -> None:
    made = make(dtype_of(backend), 0)
    shapes = Shapes()
    with torch.no_grad():
        answer = compiled(backend, made, shapes)
        eager = pa.attention(*made.tensors, backend=backend, return_lse=True, **made.given)
    assert_right(answer[0], *made.tensors, **made.given)
    torch.testing.assert_close(answer[1], eager[1], atol=2e-3, rtol=1e-3)
    assert [(real.shape, real.stride(), real.dtype) for real in answer] == shapes.expected


@every_backend
def test_generated_code_around_the_operator_finds_the_strides_it_was_told(backend: Name) -> None:
    made = Made(*qkv((2, 300), dtype=dtype_of(backend)), {})
    with torch.no_grad():
        out, _ = compiled(backend, made, "inductor")
    assert_right(out, *made.tensors)


@takes("backward")
@every_structure
def test_gradients_of_a_graph_are_the_eager_ones(backend: Name, make: Make) -> None:
    made = make(dtype_of(backend), 0)
    inputs = [tensor.requires_grad_() for tensor in made.tensors]
    upstream = drawn(*made.q.shape[:-1], made.v.shape[-1], dtype=made.q.dtype, seed=9)
    eager = attend(backend, *inputs, **made.given)
    want = torch.autograd.grad(eager, inputs, upstream)
    graph = torch.compile(
        lambda q, k, v: pa.attention(q, k, v, backend=backend, **made.given),
        fullgraph=True, backend="aot_eager", dynamic=False,
    )  # fmt: skip
    got = torch.autograd.grad(graph(*inputs), inputs, upstream)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=5e-2, rtol=5e-2)


def test_lengths_that_change_do_not_compile_anew() -> None:
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    q, k, v = qkv((520,))

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, documents: pa.Packed) -> torch.Tensor:
        return pa.attention(q, k, v, structure=documents)

    graph = torch.compile(call, fullgraph=True, backend=counter, dynamic=False)
    for lengths in ([200, 300], [300, 200], [300, 17]):
        documents = pa.Packed.from_lengths(lengths)
        with torch.no_grad():
            assert_right(graph(q, k, v, documents), q, k, v, structure=documents)
    assert counter.frame_count == 1
