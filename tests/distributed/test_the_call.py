"""The call over ranks keeps what the call on one promises: layers, choices, logs, buffers, autocast, packed rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, gather, shard
from tests.distributed.pool import Pool

HERE = __name__
ROWS = 9
DEGREES = [{"ulysses": 3}, {"ring": 3}, {"gather": 3}]
each_strategy = pytest.mark.parametrize("degrees", DEGREES, ids=str)


def tensors(*shape: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(*shape, generator=random) for _ in range(3)]


def in_a_layer(group: dist.ProcessGroup, degrees: dict[str, int]) -> list[str]:
    parallel = SequenceParallel(**degrees, mesh=group)
    layer = pa.Attention(3, 8, parallel=parallel, causal=True, backend="blocked")
    q, k, v = tensors(2, ROWS, 3, 8)
    want = pa.attention(q, k, v, causal=True)
    local = [shard(tensor, parallel) for tensor in (q, k, v)]
    with pa.record_routes() as log:
        got = layer(*local)
    torch.testing.assert_close(got, shard(want, parallel), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="4 heads|3 heads"):
        layer(*tensors(2, ROWS // 3, 4, 8))
    dist.barrier(group)
    plain = layer(q, k, v, parallel=None)
    torch.testing.assert_close(plain, want, atol=1e-5, rtol=0)
    return [*(entry.route for entry in log.entries), layer.last_route.name]


@each_strategy
def test_a_layer_has_its_own_choice_and_route_and_a_call_may_say_otherwise(pool: Pool, degrees: dict[str, int]) -> None:
    for routes in pool.run(3, f"{HERE}:in_a_layer", degrees):
        assert set(routes) == {"cpu:blocked"}


def in_a_scope(group: dist.ProcessGroup, degrees: dict[str, int]) -> set[str]:
    parallel = SequenceParallel(**degrees, mesh=group)
    q = shard(tensors(1, ROWS, 3, 8)[0], parallel)
    routes = set()
    for choice in ("blocked", "sdpa"):
        with pa.use_backend(choice), pa.record_routes() as log:
            pa.attention(q, q, q, parallel=parallel)
        routes |= {entry.route for entry in log.entries}
    return routes


@each_strategy
def test_a_scoped_choice_holds_for_the_calls_inside(pool: Pool, degrees: dict[str, int]) -> None:
    assert pool.run(3, f"{HERE}:in_a_scope", degrees) == [{"cpu:blocked", "cpu:sdpa"}] * 3


def into_a_buffer(group: dist.ProcessGroup, degrees: dict[str, int]) -> None:
    parallel = SequenceParallel(**degrees, mesh=group)
    text, *_ = tensors(2, 2, 3, 8)
    q, k, v = (shard(tensor, parallel) for tensor in tensors(2, ROWS, 3, 8))
    joint = pa.Joint(text, text, text)
    want, want_lse = pa.attention(q, k, v, joint=joint, parallel=parallel, return_lse=True)
    out = torch.full((2, 3, 5, 8), float("nan")).transpose(1, 2)
    got, lse = pa.attention(q, k, v, joint=joint, parallel=parallel, return_lse=True, out=out)
    assert got is out
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
    assert [part.shape[1] for part in joint.split(got)] == [2, 3]
    with pytest.raises(ValueError, match=r"out: \[2, 5, 3, 8\]"):
        pa.attention(q, k, v, joint=joint, parallel=parallel, out=torch.empty(2, 3, 3, 8))


@each_strategy
def test_the_answer_goes_into_the_caller_s_buffer(pool: Pool, degrees: dict[str, int]) -> None:
    pool.run(3, f"{HERE}:into_a_buffer", degrees)


def under_autocast(group: dist.ProcessGroup, degrees: dict[str, int]) -> None:
    parallel = SequenceParallel(**degrees, mesh=group)
    q, k, v = tensors(1, ROWS, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        want = pa.attention(q, k.double().float(), v.bfloat16())
        local = (shard(q, parallel), shard(k, parallel), shard(v.bfloat16(), parallel))
        got = pa.attention(*local, parallel=parallel)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), shard(want, parallel).float(), atol=2e-2, rtol=0)
    with pytest.raises(TypeError, match="one dtype"):
        pa.attention(*local, parallel=parallel)


@each_strategy
def test_autocast_casts_before_anything_is_sent(pool: Pool, degrees: dict[str, int]) -> None:
    pool.run(3, f"{HERE}:under_autocast", degrees)


def packed_rows(group: dist.ProcessGroup, degrees: dict[str, int]) -> None:
    parallel = SequenceParallel(**degrees, mesh=group)
    structure = pa.Packed.from_lengths([4, 5])
    q, k, v = tensors(ROWS, 3, 8)
    want, want_lse = pa.attention(q, k, v, structure=structure, causal=True, return_lse=True)
    local = [shard(tensor, parallel, dim=0) for tensor in (q, k, v)]
    got, lse = pa.attention(*local, structure=structure, causal=True, return_lse=True, parallel=parallel)
    torch.testing.assert_close(got, shard(want, parallel, dim=0), atol=1e-5, rtol=0)
    torch.testing.assert_close(lse, shard(want_lse, parallel, dim=1), atol=1e-5, rtol=0)
    given = tuple(tensor[:2] for tensor in (q, k, v))
    more = pa.Packed.from_lengths([4, 7])
    got = pa.attention(*local, structure=more, parallel=parallel, replicated=pa.Replicated(prefix=given))
    want = pa.attention(*(torch.cat([tensor[:2], tensor]) for tensor in (q, k, v)), structure=more)
    torch.testing.assert_close(got[2:], shard(want[2:], parallel, dim=0), atol=1e-5, rtol=0)
    torch.testing.assert_close(got[:2], want[:2], atol=1e-5, rtol=0)


@each_strategy
def test_packed_rows_have_three_axes(pool: Pool, degrees: dict[str, int]) -> None:
    pool.run(3, f"{HERE}:packed_rows", degrees)


def through_shard_and_gather(group: dist.ProcessGroup, rows: Any, dim: int) -> None:
    parallel = SequenceParallel(ring=3, mesh=group)
    total = rows if isinstance(rows, int) else sum(rows)
    shape = [2, 3, 4]
    shape[dim] = total
    whole = torch.arange(float(torch.Size(shape).numel())).reshape(shape).requires_grad_()
    own = shard(whole, parallel.holding(rows), dim=dim)
    back = gather(own * 1.0, parallel, dim=dim, rows=rows)
    assert torch.equal(back, whole)
    assert torch.equal(gather(own, parallel.holding(rows), dim=dim), whole)
    rank = dist.get_rank(group)
    (back * (rank + 1)).sum().backward()  # ranks want 1, 2 and 3 of each row: its owner is told 6
    want = torch.zeros_like(whole)
    shard(want, parallel.holding(rows), dim=dim).fill_(6.0)
    assert torch.equal(whole.grad, want)


@pytest.mark.parametrize("rows", [6, 7, 2, (0, 4, 1)], ids=str)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_gather_undoes_shard_and_sends_gradients_home(pool: Pool, rows: Any, dim: int) -> None:
    pool.run(3, f"{HERE}:through_shard_and_gather", rows, dim)


def gathers_other_rows(group: dist.ProcessGroup) -> str:
    parallel = SequenceParallel(ring=3, mesh=group)
    mine = torch.zeros(1, 4 if dist.get_rank(group) == 1 else 3, 2)
    with pytest.raises((ValueError, pa.UnsupportedRequest)) as caught:
        gather(mine, parallel)
    return str(caught.value)


def test_gather_of_rows_that_nobody_stated_is_refused_on_every_rank(pool: Pool) -> None:
    texts = pool.run(3, f"{HERE}:gathers_other_rows")
    assert all("rows" in text for text in texts)


def on_a_mesh(group: dist.ProcessGroup) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    parallel = SequenceParallel(ulysses=2, mesh=mesh["sequence"])
    q, k, v = tensors(1, 8, 4, 8)
    shift = float(mesh.get_coordinate()[0])  # each half of the mesh has a sequence of its own
    want = pa.attention(q + shift, k, v, causal=True)
    got = pa.attention(*(shard(t, parallel) for t in (q + shift, k, v)), causal=True, parallel=parallel)
    torch.testing.assert_close(got, shard(want, parallel), atol=1e-5, rtol=0)
    with pytest.raises(pa.UnsupportedRequest, match="one axis"):
        pa.attention(q, k, v, parallel=SequenceParallel(ulysses=2, ring=2, mesh=mesh))


def test_a_mesh_s_axis_is_a_group(pool: Pool) -> None:
    pool.run(4, f"{HERE}:on_a_mesh")


def the_same_bits(group: dist.ProcessGroup, degrees: dict[str, int]) -> None:
    parallel = SequenceParallel(**degrees, mesh=group)
    q, k, v = (shard(tensor, parallel) for tensor in tensors(2, ROWS, 3, 8))
    grads = []
    for _ in range(3):
        leaf = q.clone().requires_grad_()
        out = pa.attention(leaf, k, v, parallel=parallel, deterministic=True, causal=True)
        out.square().sum().backward()
        grads.append((out, leaf.grad))
    assert all(torch.equal(out, grads[0][0]) and torch.equal(grad, grads[0][1]) for out, grad in grads)


@each_strategy
def test_deterministic_calls_give_the_same_bits(pool: Pool, degrees: dict[str, int]) -> None:
    pool.run(3, f"{HERE}:the_same_bits", degrees)
