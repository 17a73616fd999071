"""torch.compile: one graph for many lengths, equal to eager, and choices that are never stale."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.operators import define_once

_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Block(torch.nn.Module):
    """A small transformer block over [B,S,C] or packed [T,C]."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)
        self.attn = pa.Attention(2, 8, **arguments)
        self.out = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, structure: pa.structures.Structure | None = None) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(-3)
        return x + self.out(self.attn(q, k, v, structure).flatten(-2))


class Graphs:
    """A Dynamo backend that counts the graphs it is given and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        self.count += 1
        return module.forward


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


LENGTHS = [
    [3, 4],
    [5, 2, 1],
    [8],
    [2, 2, 2],
    [7, 1],
    [1, 1, 1, 1],
    [6, 5],
    [9, 3],
    [4, 4, 4],
    [10],
    [2, 9],
    [3, 3, 3, 3],
]


def structures(kind: str) -> list[tuple[torch.Tensor, Any]]:
    if kind == "dense":
        return [(torch.randn(2, length, 16), pa.Dense() if length % 2 else None) for length in range(3, 15, 2)]
    if kind == "packed":
        return [(torch.randn(sum(lengths), 16), pa.Packed.from_lengths(lengths)) for lengths in LENGTHS]
    rows = [[9, 4], [7, 2], [12, 12], [3, 1], [5, 2], [8, 8], [6, 4], [11, 2], [10, 9], [4, 3], [13, 2], [14, 6]]
    return [(torch.randn(2, max(kept), 16), pa.KeyPadding.from_lengths(kept, max(kept))) for kept in rows]


@pytest.mark.parametrize("kind", ["dense", "key_padding", "packed"])
def test_fullgraph_equals_eager_in_at_most_three_graphs(kind: str) -> None:
    block, graphs = Block(), Graphs()
    compiled = torch.compile(block, fullgraph=True, backend=graphs)
    with torch.no_grad():
        for x, structure in structures(kind):
            assert torch.equal(compiled(x, structure), block(x, structure))
    # Dynamo of torch 2.6 learns a dynamic axis of the input and of the structure's tensor one after the other
    assert graphs.count <= (3 if _TORCH >= (2, 9) else 4)


def test_gradients_flow_through_the_graph() -> None:
    block = Block(causal=True)
    x, structure = structures("packed")[1]
    want = torch.autograd.grad(block(x, structure).square().sum(), list(block.parameters()))
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(compiled(x, structure).square().sum(), list(block.parameters()))
    for ours, eager in zip(got, want, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo looks at the mask's view
def test_a_mask_takes_its_gradient_through_the_graph() -> None:
    q = torch.randn(1, 4, 2, 8)

    def call(bias: torch.Tensor, mask: Any) -> torch.Tensor:
        return pa.attention(q, q, q, structure=mask)

    bias = torch.randn(1, 2, 4, 4, requires_grad=True)
    mask = pa.Mask(bias)
    (want,) = torch.autograd.grad(call(bias, mask).square().sum(), bias)
    (got,) = torch.autograd.grad(
        torch.compile(call, fullgraph=True, backend="aot_eager")(bias, mask).square().sum(), bias
    )
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["mask", "spans", "paged", "window", "lse", "out"])
def test_the_other_structures_and_arguments_compile_too(kind: str) -> None:
    q = torch.randn(1, 6, 2, 8)
    k = torch.randn(4, 2, 2, 8) if kind == "paged" else q
    arguments: dict[str, Any] = {
        "mask": {"structure": pa.Mask(torch.rand(1, 6) > 0.3)},
        "spans": {"structure": pa.Spans([[(2, 5)]])},
        "paged": {"structure": pa.Paged([[2, 0, 3]], [6]), "causal": True},
        "window": {"window": (2, 0), "softcap": 3.0, "causal": True},
        "lse": {"return_lse": True},
        "out": {"out": torch.empty(1, 6, 2, 8)},
    }[kind]
    with torch.no_grad():
        want = pa.attention(q, k, k, **{**arguments, "out": None})
        got = torch.compile(lambda: pa.attention(q, k, k, **arguments), fullgraph=True, backend="aot_eager")()
    for ours, eager in zip(got if kind == "lse" else [got], want if kind == "lse" else [want], strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.filterwarnings("ignore:Skipping serialization of skipfiles_inline_module_allowlist:UserWarning")
def test_the_whole_stack_compiles_with_inductor() -> None:
    block = Block()
    compiled = torch.compile(block, fullgraph=True)
    with torch.no_grad():
        for x, structure in structures("packed")[:3]:
            torch.testing.assert_close(compiled(x, structure), block(x, structure), atol=1e-5, rtol=1e-5)


def test_a_scope_around_compiled_code_takes_effect_and_is_never_stale() -> None:
    q = torch.randn(1, 4, 2, 8)
    compiled = torch.compile(lambda: pa.attention(q, q, q), fullgraph=True, backend="eager")

    def route() -> str:
        with pa.record_routes() as log:
            compiled()
        return log.entries[0].route

    assert route() == "cpu:sdpa"
    with pa.use_backend("blocked"):
        assert route() == "cpu:blocked"
    assert route() == "cpu:sdpa"
    with pa.use_backend("blocked"):
        assert route() == "cpu:blocked"


def test_a_scope_inside_compiled_code_binds_the_calls_inside_it() -> None:
    q = torch.randn(1, 4, 2, 8)

    def two() -> torch.Tensor:
        with pa.use_backend("blocked"):
            inside = pa.attention(q, q, q)
        return inside + pa.attention(q, q, q)

    with pa.record_routes() as log:
        torch.compile(two, fullgraph=True, backend="eager")()
    assert [entry.route for entry in log.entries] == ["cpu:blocked", "cpu:sdpa"]


def test_a_structure_keeps_its_preparation_inside_graphs() -> None:
    x, structure = structures("packed")[0]
    compiled = torch.compile(Block(), fullgraph=True, backend="eager")
    with torch.no_grad():
        for _ in range(3):
            compiled(x, structure)
    assert structure.builds == 1


def test_bad_input_is_refused_inside_graphs_too() -> None:
    x = torch.randn(6, 16)
    compiled = torch.compile(Block(), backend="eager")
    with torch.no_grad(), pytest.raises(ValueError, match="T=6"):
        compiled(x, pa.Packed.from_lengths([4, 3]))


def test_autocast_in_a_graph() -> None:
    q = torch.randn(1, 4, 2, 8)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        want = pa.attention(q, q, q)
        got = torch.compile(lambda: pa.attention(q, q, q), fullgraph=True, backend="aot_eager")()
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)


def double(q: torch.Tensor) -> torch.Tensor:
    return q * 2


def test_an_operator_is_defined_once_whatever_asks_again() -> None:
    first = define_once("polyattn_tests::double", "(Tensor q) -> Tensor", double, torch.empty_like)
    second = define_once("polyattn_tests::double", "(Tensor q) -> Tensor", double, torch.empty_like)
    assert first is second
    with pytest.raises(RuntimeError, match="polyattn_tests::double") as refusal:
        define_once("polyattn_tests::double", "(Tensor q, int n) -> Tensor", double, torch.empty_like)
    assert "int n" in str(refusal.value)


def test_reloading_the_traced_module_keeps_its_operator() -> None:
    import gc
    import importlib

    import polyattn.traced

    importlib.reload(polyattn.traced)
    gc.collect()
    q = torch.randn(1, 4, 2, 8)
    got = torch.compile(lambda: pa.attention(q, q, q), fullgraph=True, backend="eager")()
    assert torch.equal(got, pa.attention(q, q, q))


def test_the_operators_pass_torchs_own_checks() -> None:
    torch.compile(pa.attention, backend="eager")(*[torch.zeros(1, 1, 1, 1)] * 3)  # they are defined where first needed
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    rest = (*[None] * 5, 0, 0, -1, -1, 0.3, 0.0)
    causal_with_lse, causal = ("\x1e".join(["", "", "1", lse, *[""] * 7]) for lse in ("1", ""))
    torch.library.opcheck(torch.ops.polyattn.attention.default, (q, q, q, *rest, causal_with_lse))
    torch.library.opcheck(torch.ops.polyattn.inference.default, (*[q.detach()] * 3, *rest, causal))


def test_masks_of_every_rank_pass_one_compiled_function():
    """A second rank is a number that Dynamo takes for one that changes."""
    q, k, v = (torch.randn(2, rows, 2, 8) for rows in (3, 5, 5))
    compiled = torch.compile(
        lambda q, k, v, mask: pa.attention(q, k, v, structure=mask), fullgraph=True, backend="eager"
    )
    for shape in ((5,), (2, 3, 5), (2, 5), (2, 2, 3, 5)):
        mask = pa.Mask(torch.rand(shape) < 0.7)
        torch.testing.assert_close(compiled(q, k, v, mask), pa.attention(q, k, v, structure=mask))
