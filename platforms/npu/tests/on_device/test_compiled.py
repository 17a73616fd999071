"""Compiled calls on a device: graphs that hold for other lengths, and tensors without an element."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.on_device.here import assert_near, exact, qkv, record

pytestmark = pytest.mark.npu

Rows = tuple[int, ...]
backends = pytest.mark.parametrize("backend", ["fusion", "fia"])

#: What a call has beside q, k and v, by their rows.
CALLS: dict[str, Callable[[Rows, Rows], dict[str, Any]]] = {
    "plain": lambda q, k: {},
    "causal": lambda q, k: {"causal": True},
    "window": lambda q, k: {"window": (2, 1)},
    "padding": lambda q, k: {"structure": pa.KeyPadding.from_lengths([3, k[1]], k[1], queries="all")},
    "documents": lambda q, k: {"structure": pa.Packed.from_lengths([3, q[0] - 3])},
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(dynamic: bool | None = None) -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        return pa.attention(q, k, v, **given)

    return torch.compile(attend, backend="aot_eager", dynamic=dynamic, fullgraph=True)


@backends
@pytest.mark.parametrize("named", CALLS)
def test_a_graph_of_unknown_sizes_holds_for_other_lengths(backend: str, named: str) -> None:
    attend, packed = compiled(dynamic=True), named == "documents"
    shapes = [((9,), (9,)), ((12,), (12,)), ((20,), (20,))] if packed else [((2, 5), (2, 7)), ((2, 6), (2, 9))]
    for place, (queries, keys) in enumerate(shapes):
        q, k, v = qkv(queries, keys)
        given = CALLS[named](queries, keys)
        with torch.compiler.set_stance("default" if place == 0 else "fail_on_recompile"):
            out = attend(q, k, v, backend=backend, **given)
        assert_near(out, exact(q, k, v, **given))


EMPTY: dict[str, tuple[Rows, Rows]] = {
    "no sample": ((0, 5), (0, 7)),
    "no query": ((2, 0), (2, 7)),
    "no key": ((2, 5), (2, 0)),
}


@backends
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("named", EMPTY)
def test_tensors_without_an_element_need_no_op(monkeypatch, backend: str, dynamic: bool | None, named: str) -> None:
    asked = record(monkeypatch)
    q, k, v = qkv(*EMPTY[named])
    out = compiled(dynamic)(q, k, v, backend=backend)
    assert out.shape == q.shape
    assert out.cpu().eq(0).all()
    assert asked == []


@backends
def test_documents_without_a_token_need_no_op(monkeypatch, backend: str) -> None:
    asked = record(monkeypatch)
    q, k, v = qkv((0,))
    assert compiled()(q, k, v, structure=pa.Packed.from_lengths([0, 0]), backend=backend).shape == q.shape
    assert asked == []
