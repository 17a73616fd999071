"""What a call costs once its ranks have agreed: its exchanges and nothing else; what is derived serves all layers."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, shard
from polyattn.distributed.geometry import Geometry
from polyattn.distributed.peers import Peers
from polyattn.structures import Structure
from tests.distributed.counting import Allocations, exchanges
from tests.distributed.glued_cases import call_of
from tests.distributed.pool import Pool

HERE = __name__
ROWS, LAYERS = 24, 40


def many_layers(
    group: dist.ProcessGroup, degrees: dict[str, int], name: str, more: dict[str, Any]
) -> tuple[Counter[str], Counter[str], list[int], int]:
    """Exchanges of the first layer and of the others; how often each structure was worked out; how many plans."""
    call = call_of(name, ROWS, ROWS)
    q, k, v = (torch.randn(call.batch, ROWS, 4, 8) for _ in range(3))
    parallel = SequenceParallel(**degrees, mesh=group).holding(ROWS)
    local = [shard(tensor, parallel) for tensor in (q, k, v)]
    layers = [
        pa.Attention(4, 8, parallel=parallel, prefix=f"blocks.{place}", **call.arguments) for place in range(LAYERS)
    ]
    structure: Structure = call.structure or pa.Dense()
    with exchanges() as first:
        layers[0](*local, structure, **more)
    with exchanges() as rest:
        for layer in layers[1:]:
            layer(*local, structure, **more)
    plans = {id(value): value for value in structure.parts.values() if isinstance(value, Geometry)}
    parts = [part for plan in plans.values() for part in (plan.parts or ())]
    parts += [part for plan in plans.values() if plan.ring for step in plan.ring.parts for part in step]
    return first, rest, [part.structure.builds for part in parts if part.structure is not None], len(plans)


@pytest.mark.parametrize(
    ("degrees", "each"),
    [
        ({"ulysses": 3}, {"all_to_all_single": 2}),
        ({"gather": 3}, {"all_gather": 1}),
        ({"ring": 3}, {"batch_isend_irecv": 2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["dense", "tail padding", "mask of pairs", "documents", "spans"])
def test_a_layer_makes_its_exchanges_and_no_other(
    pool: Pool, degrees: dict[str, int], each: dict[str, int], name: str
) -> None:
    for rank, (first, rest, builds, plans) in enumerate(pool.run(3, f"{HERE}:many_layers", degrees, name, {})):
        assert rest <= Counter({what: count * (LAYERS - 1) for what, count in each.items()}), rank
        assert "ring" in degrees or rest.total() == sum(each.values()) * (LAYERS - 1)
        assert first["agreement"] == 1, "the ranks agree once"
        assert first.total() <= sum(each.values()) + 1
        assert set(builds) <= {1}, "every derived structure is worked out once for 40 layers"
        assert plans == 1


def test_an_lse_is_one_more_exchange_of_ulysses_and_none_of_the_ring(pool: Pool) -> None:
    counts = pool.run(3, f"{HERE}:many_layers", {"ulysses": 3}, "dense", {"return_lse": True})
    assert all(rest == {"all_to_all_single": 3 * (LAYERS - 1)} for _, rest, _, _ in counts)
    counts = pool.run(3, f"{HERE}:many_layers", {"ring": 3}, "dense", {"return_lse": True})
    assert all(rest == {"batch_isend_irecv": 2 * (LAYERS - 1)} for _, rest, _, _ in counts)


def of_padding(group: dist.ProcessGroup, lengths: list[int]) -> int:
    """Shards that this rank passes on."""
    q = torch.randn(len(lengths), ROWS, 4, 8)
    parallel = SequenceParallel(ring=3, mesh=group)
    local = shard(q, parallel)
    structure = pa.KeyPadding.from_lengths(lengths, ROWS)
    with patch.object(Peers, "send", autospec=True, side_effect=Peers.send) as send:
        pa.attention(local, local, local, structure=structure, parallel=parallel)
    return send.call_count


@pytest.mark.parametrize(("lengths", "sent"), [([24, 24], 6), ([12, 8], 4), ([3, 2], 2), ([0, 0], 0)])
def test_shards_of_padding_alone_are_not_passed_on(pool: Pool, lengths: list[int], sent: int) -> None:
    assert sum(pool.run(3, f"{HERE}:of_padding", lengths)) == sent


def complete_keys(group: dist.ProcessGroup, name: str) -> Counter[str]:
    call = call_of(name, ROWS, ROWS)
    q = torch.randn(call.batch, ROWS, 4, 8)
    parallel = SequenceParallel(ulysses=2, mesh=group).holding(ROWS)
    with exchanges() as counts:
        pa.attention(
            shard(q, parallel), q, q, structure=call.structure, parallel=parallel,
            replicated=pa.Replicated(kv=True), **call.arguments,
        )  # fmt: skip
    return counts


@pytest.mark.parametrize("name", ["dense", "causal", "tail padding", "documents"])
def test_with_complete_keys_nothing_is_communicated_not_even_agreement(pool: Pool, name: str) -> None:
    assert pool.run(2, f"{HERE}:complete_keys", name) == [Counter(), Counter()]


def ring_memory(group: dist.ProcessGroup, training: bool) -> tuple[int, int]:
    """The most bytes held beside the caller's tensors and slots, and the bytes of one shard of keys and values."""
    rows, ranks = 600, dist.get_world_size(group)
    q = torch.randn(1, 1, 4, 16, requires_grad=training)
    k, v = (torch.randn(1, rows, 4, 16, requires_grad=training) for _ in range(2))
    parallel = SequenceParallel(ring=ranks, mesh=group)
    with Allocations() as allocations:
        out = pa.attention(q, k, v, parallel=parallel)
        del out
    return allocations.peak, (k.numel() + v.numel()) * k.element_size()


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("world", [3, 4])
def test_the_ring_never_holds_more_than_two_shards_of_keys(pool: Pool, world: int, training: bool) -> None:
    for peak, chunk in pool.run(world, f"{HERE}:ring_memory", training):
        assert chunk < peak < 2.1 * chunk


def untouched(group: dist.ProcessGroup, degrees: dict[str, int]) -> None:
    """The caller's tensors and structure are what they were."""
    q, k, v = (torch.randn(2, 8, 4, 8) for _ in range(3))
    text = torch.randn(2, 3, 4, 8)
    parallel = SequenceParallel(**degrees, mesh=group)
    structure = pa.KeyPadding.from_lengths([20, 9], 2 * 8 + 6)
    before = [tensor.clone() for tensor in (q, k, v, text, structure.keep)]
    pa.attention(
        q, k, v, structure=structure, parallel=parallel, joint=pa.Joint(text, text, text),
        replicated=pa.Replicated(suffix=(text, text, text)),
    )  # fmt: skip
    assert all(torch.equal(*pair) for pair in zip(before, (q, k, v, text, structure.keep), strict=True))


@pytest.mark.parametrize("degrees", [{"ulysses": 2}, {"ring": 2}, {"gather": 2}], ids=str)
def test_the_caller_s_tensors_are_only_read(pool: Pool, degrees: dict[str, int]) -> None:
    pool.run(2, f"{HERE}:untouched", degrees)
