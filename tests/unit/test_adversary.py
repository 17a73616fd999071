"""Attacks from outside: a naive oracle of its own, and what engines do around a call that nobody expects."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import polyattn as pa


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch.set_num_threads(threads)


def naive(q: Any, k: Any, v: Any, sees: Callable[[int, int, int], bool], scale: float, softcap: float) -> Any:
    """Attention of [B,S,H,D] tensors, one query row after the other; `sees(b, i, j)` says who may attend to whom."""
    group = q.shape[2] // k.shape[2]
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=torch.float64)
    for b, i, h in itertools.product(range(q.shape[0]), range(q.shape[1]), range(q.shape[2])):
        seen = [j for j in range(k.shape[1]) if sees(b, i, j)]
        if seen:
            scores = k[b, seen, h // group].double() @ q[b, i, h].double() * scale
            scores = softcap * (scores / softcap).tanh() if softcap else scores
            lse[b, h, i] = scores.logsumexp(0)
            out[b, i, h] = scores.softmax(0) @ v[b, seen, h // group].double()
    return out, lse


def strided(draw: random.Random, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Random values in memory of an unusual layout."""
    order = draw.sample(range(4), 4)
    memory = torch.randn([shape[axis] + draw.choice((0, 2)) for axis in order], dtype=torch.float64).to(dtype)
    view = memory.permute([order.index(axis) for axis in range(4)])
    return view[tuple(slice(0, size) for size in shape)]


@pytest.mark.parametrize("seed", range(80))
def test_random_requests_equal_a_naive_loop_and_run_where_explain_says(seed):
    draw = random.Random(seed)
    dtype, tolerance = draw.choice([(torch.float64, 1e-9), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)])
    kv_heads, width, keys = draw.randint(1, 2), draw.choice((1, 3, 8)), draw.choice((0, 1, 2, 5, 7, 11))
    heads, batch, value_width = kv_heads * draw.randint(1, 3), draw.choice((1, 2)), draw.choice((width, 1, 5))
    queries = draw.choice((keys, keys, 0, 1, 3, 9))
    q = strided(draw, batch, queries, heads, width, dtype=dtype)
    k = strided(draw, batch, keys, kv_heads, width, dtype=dtype)
    v = strided(draw, batch, keys, kv_heads, value_width, dtype=dtype)
    kept = torch.tensor([[draw.random() < 0.7 for _ in range(keys)] for _ in range(batch)], dtype=torch.bool)
    structure = draw.choice([None, pa.KeyPadding.from_mask(kept, queries="all"), pa.Mask.keys(kept)])
    if structure is not None:
        k[~kept], v[~kept] = math.nan, math.inf
    causal, left, right = draw.random() < 0.4, draw.choice((None, 0, 2)), draw.choice((None, 0, 1, 4))
    softcap, scale = draw.choice((0.0, 0.0, 2.0)), draw.choice((width**-0.5, 0.0, -0.3, 1e-8, 2.5))

    def sees(b: int, i: int, j: int) -> bool:
        offset = j - (i + keys - queries)
        bounds = (0 if causal else math.inf) if right is None else (0 if causal else right)
        return (structure is None or bool(kept[b, j])) and offset <= bounds and (left is None or -offset <= left)

    call: dict[str, Any] = {
        "structure": structure, "causal": causal, "window": (left, right), "scale": scale, "softcap": softcap,
        "return_lse": True, "backend": draw.choice((None, "blocked", None if softcap else "sdpa")),
    }  # fmt: skip
    with pa.record_routes() as log:
        out, lse = pa.attention(q, k, v, **call)
    want, want_lse = naive(q, k, v, sees, scale, softcap)
    torch.testing.assert_close(out.double(), want, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse.double(), want_lse, atol=max(tolerance, 1e-5), rtol=max(tolerance, 1e-5))
    assert [entry.route for entry in log.entries] == [pa.explain(q, k, v, **call).chosen.name]


@pytest.mark.parametrize("backend", ["sdpa", "blocked"])
@pytest.mark.parametrize("target", [0, 1, 2])
def test_out_may_share_the_memory_of_an_input(backend, target):
    inputs = [torch.randn(2, 300, 2, 8) for _ in range(3)]
    for call in ({}, {"causal": True}, {"window": 3}, {"structure": pa.KeyPadding.from_lengths([300, 7], 300)}):
        want = pa.attention(*inputs, backend=backend, **call)
        copies = [tensor.clone() for tensor in inputs]
        pa.attention(*copies, backend=backend, out=copies[target].view_as(copies[target]), **call)
        torch.testing.assert_close(copies[target], want)


def compiled_gradient(
    build: Callable[[], Any], rows: torch.Tensor, pool: Any = None, *, kept: bool, backend: str
) -> Any:
    """The gradients of q that compiled and eager code give for one structure; not `kept`: it dies before backward."""
    weights = torch.randn_like(rows)

    def attend(q: torch.Tensor, structure: Any) -> torch.Tensor:
        return pa.attention(q, q if pool is None else pool, q if pool is None else pool, structure=structure)

    found = []
    for function in (torch.compile(attend, fullgraph=True, backend=backend), attend):
        q = rows.clone().requires_grad_()
        structure = build()
        out = function(q, structure)
        if not kept:
            del structure
            gc.collect()
        (out * weights).sum().backward()
        found.append(q.grad)
    return found


def packed_with_spans() -> pa.Packed:
    return pa.Packed.from_lengths([4, 2], spans=[[(1, 3)], []])


def test_a_compiled_backward_keeps_the_spans_of_packed_documents_that_are_gone():
    got, want = compiled_gradient(packed_with_spans, torch.randn(6, 2, 8), kept=False, backend="eager")
    torch.testing.assert_close(got, want)


def test_a_compiled_backward_keeps_the_spans_of_paged_rows():
    pool = torch.randn(3, 2, 2, 8)
    got, want = compiled_gradient(
        lambda: pa.Paged([[0, 1, 2]], [6], spans=[[(1, 4)]]), torch.randn(1, 6, 2, 8), pool,
        kept=True, backend="aot_eager",
    )  # fmt: skip
    torch.testing.assert_close(got, want)


def test_a_compiled_backward_of_spans_runs():
    got, want = compiled_gradient(lambda: pa.Spans([[(1, 3)]]), torch.randn(1, 6, 2, 8), kept=True, backend="aot_eager")
    torch.testing.assert_close(got, want)


def test_a_compiler_that_copies_its_inputs_keeps_the_spans_of_packed_documents():
    def copying(module: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:  # as CUDA graphs do
        return lambda *inputs: module(*(t.clone() if isinstance(t, torch.Tensor) else t for t in inputs))

    def attend(q: torch.Tensor, structure: Any) -> Any:
        return pa.attention(q, q, q, structure=structure)

    rows, structure = torch.randn(6, 2, 8), packed_with_spans()
    got = torch.compile(attend, fullgraph=True, backend=copying)(rows, structure)
    torch.testing.assert_close(got, attend(rows, structure))


@pytest.mark.parametrize(
    ("build", "call"),
    [
        (lambda: pa.Mask(torch.ones(1, 6, 6).tril()), {}),
        (lambda: pa.Mask(torch.ones(1, 6, 6).tril(-1).bool()), {}),
        (lambda: pa.KeyPadding.from_mask([[1, 0, 1, 1, 0, 1]]), {"window": 1}),
    ],
)
def test_a_structure_first_used_in_inference_mode_serves_training(build, call):
    q, structure = torch.randn(1, 6, 2, 8), build()
    with torch.inference_mode():
        pa.attention(q, q, q, structure=structure, **call)
    pa.attention(q.requires_grad_(), q, q, structure=structure, **call).sum().backward()


def test_an_update_that_raises_changes_nothing():
    rows, structure = torch.randn(4, 1, 8), pa.Packed.from_lengths([2, 2], capacity=(2, 3))
    with torch.inference_mode():
        pa.attention(rows, rows, rows, structure=structure)
    with contextlib.suppress(RuntimeError):
        structure.update_([1, 3])
    want = pa.attention(rows, rows, rows, structure=pa.Packed.from_lengths(structure.lengths_q))
    torch.testing.assert_close(pa.attention(rows, rows, rows, structure=structure), want)


def test_a_fullgraph_with_dynamic_shapes():
    q = torch.randn(1, 6, 2, 8)
    attend = torch.compile(lambda q: pa.attention(q, q, q), fullgraph=True, backend="eager", dynamic=True)
    torch.testing.assert_close(attend(q), pa.attention(q, q, q))


@pytest.mark.parametrize(("name", "values"), [("scale", (0.1, 0.2)), ("softcap", (1.0, 2.0)), ("window", (1, 2))])
def test_a_fullgraph_whose_argument_varies(name, values):
    q = torch.randn(1, 6, 2, 8)
    attend = torch.compile(lambda q, x: pa.attention(q, q, q, **{name: x}), fullgraph=True, backend="eager")
    for value in values:
        torch.testing.assert_close(attend(q, value), pa.attention(q, q, q, **{name: value}))


def test_a_fullgraph_of_a_cross_layer_with_padding():
    layer, q = pa.Attention(2, 8, role="cross"), torch.randn(1, 6, 2, 8)
    got = torch.compile(layer, fullgraph=True, backend="eager")(q, q, q, pa.KeyPadding.from_lengths([3], 6))
    torch.testing.assert_close(got, layer(q, q, q, pa.KeyPadding.from_lengths([3], 6)))


def route_of(call: Callable[[], object]) -> str:
    with pa.record_routes() as log:
        call()
    return log.entries[0].route


def in_new_context(code: Callable[[], Any]) -> Any:
    """What `code` returns in a thread of its own, so that a scope that it leaks dies with it."""
    return asyncio.run(asyncio.to_thread(code))


def test_one_scope_object_nests_in_itself():
    q = torch.randn(1, 3, 1, 8)

    def code() -> str:
        scope = pa.use_backend("blocked")
        with scope, scope:
            pass
        return route_of(lambda: pa.attention(q, q, q))

    assert in_new_context(code) == "cpu:sdpa"


def test_scopes_of_overlapping_tasks_leave_compiled_calls_no_choice():
    q = torch.randn(1, 3, 1, 8)

    async def scoped(choice: str, before: int, inside: int) -> None:
        for _ in range(before):
            await asyncio.sleep(0)
        with pa.use_backend(choice):
            for _ in range(inside):
                await asyncio.sleep(0)

    async def overlapping() -> None:
        await asyncio.gather(scoped("blocked", 0, 3), scoped("sdpa", 1, 6))

    def code() -> str:
        asyncio.run(overlapping())
        return route_of(lambda: torch.compile(lambda q: pa.attention(q, q, q), backend="eager")(q))

    assert in_new_context(code) == "cpu:sdpa"


def test_out_is_refused_for_a_mask_that_wants_a_gradient_whatever_ran_before():
    q, out = torch.randn(1, 3, 1, 8), torch.empty(1, 3, 1, 8)
    structure = pa.Mask(torch.zeros(1, 3, 3, requires_grad=True))
    with torch.no_grad():
        pa.attention(q, q, q, structure=structure, out=out)
    with pytest.raises(ValueError, match="out"):
        pa.attention(q, q, q, structure=structure, out=out)


def test_a_window_given_as_a_tensor_is_refused_for_its_content_could_change():
    q = torch.randn(1, 6, 1, 8)
    with pytest.raises(TypeError, match="window"):
        pa.attention(q, q, q, window=torch.tensor(0))


@pytest.mark.parametrize("rows", [(0, 4), (4, 0)])
def test_patched_sdpa_takes_empty_tensors(rows):
    q, k = torch.randn(2, 2, rows[0], 8), torch.randn(2, 2, rows[1], 8)
    with pa.patch_sdpa():
        assert torch.nn.functional.scaled_dot_product_attention(q, k, k).shape == sdpa(q, k, k).shape


@pytest.mark.parametrize("shapes", [((4, 8), (4, 8)), ((2, 2, 4, 8), (1, 2, 4, 8))])
def test_patched_sdpa_takes_the_ranks_and_batches_that_torch_takes(shapes):
    q, k = (torch.randn(shape) for shape in shapes)
    with pa.patch_sdpa():
        torch.testing.assert_close(torch.nn.functional.scaled_dot_product_attention(q, k, k), sdpa(q, k, k))


def test_host_structures_ignore_the_default_device():
    q = torch.randn(1, 6, 2, 8)
    with torch.device("meta"):
        structure = pa.KeyPadding.from_lengths([4], 6)
    assert structure.keep.device.type == "cpu"
    torch.testing.assert_close(
        pa.attention(q, q, q, structure=structure),
        pa.attention(q, q, q, structure=pa.KeyPadding.from_lengths([4], 6)),
    )


def test_a_default_device_keeps_derivations():
    q, structure = torch.randn(1, 6, 2, 8), pa.Spans([[(1, 3)]])
    with torch.device("meta"):
        for _ in range(3):
            pa.attention(q, q, q, structure=structure)
    assert structure.builds == 1
