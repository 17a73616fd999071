"""Groups of heads: one is attended with while others travel, and the answer has the bits of one group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import polyattn as pa
from polyattn.distributed import SequenceParallel, entry, geometry, shard
from polyattn.distributed.exchange import Journey
from polyattn.distributed.heads import Ends
from polyattn.distributed.local import LocalCall
from tests.distributed.counting import Allocations
from tests.distributed.glued_cases import SQUARE, call_of, outcomes
from tests.distributed.pool import Pool
from tests.distributed.test_equal_to_one_rank import CUT, WHOLE

HERE = __name__
#: Seconds, hard, for one test.
LIMIT = 60.0
ROWS = 12
#: KV heads of the first and the last group of heads: three groups, and two.
ENDS = [(1, 1), (2, 0), (0, 1)]
HELD = ["nothing", "both apart", "keys' prefix counted", "joint front"]


@contextmanager
def grouped(ends: Ends) -> Iterator[None]:
    """Calls that are new here cut their heads so, whatever the cost model would choose."""
    with (
        patch.object(geometry, "groups_of_heads", lambda *_: (ends, "as the test says")),
        patch.object(entry, "_DENSE", pa.Dense()),  # it remembers calls that were made before
    ):
        yield


def beside_one_rank(
    group: dist.ProcessGroup, ranks: int, ends: Ends, name: str, held: list[str], more: dict[str, Any]
) -> float:
    with grouped(ends):
        found = outcomes(group, {"ulysses": ranks}, name, held, more)
    return max(apart for outcome in found.values() for apart in outcome.values())


#: Heads, and the ends of their groups: as many on each rank, or one less on the second.
ALIKE, UNEVEN = ((4, 4), (1, 0)), ((14, 7), (1, 1))
#: Structures that say something of each of four heads.
OF_FOUR_HEADS = ("additive mask of heads", "block map")


@pytest.mark.parametrize(
    ("structure", "heads", "ends"),
    [
        (name, *how)
        for name in (*CUT, *WHOLE)
        for how in ((ALIKE,) if name in OF_FOUR_HEADS else (ALIKE, UNEVEN))
    ],
    ids=str,
)  # fmt: skip
def test_outputs_lse_and_gradients_are_one_rank_s(
    pool: Pool, structure: str, heads: tuple[int, int], ends: Ends
) -> None:
    held = [name for name in HELD if structure not in SQUARE or "keys" not in name]
    more = {"heads": heads, "grad": True}
    for apart in pool.run(2, f"{HERE}:beside_one_rank", 2, ends, structure, held, more, limit=LIMIT):
        assert apart < 1e-5


@pytest.mark.parametrize("ends", [(0, 1), (1, 0)], ids=str)
def test_three_ranks_and_keys_of_another_length(pool: Pool, ends: Ends) -> None:
    more = {"heads": (12, 6), "grad": True, "rows": 13, "kv_rows": 6, "state": 13, "state_kv": 6}
    for apart in pool.run(3, f"{HERE}:beside_one_rank", 3, ends, "causal", HELD, more, limit=LIMIT):
        assert apart < 1e-5


def answers(
    group: dist.ProcessGroup, ends: Ends, name: str, dtype: torch.dtype, repeat: bool = False
) -> list[torch.Tensor]:
    """Output, LSE and gradients."""
    call = call_of(name, ROWS, ROWS)
    random = torch.Generator().manual_seed(5)
    shapes = ((12, 8), (6, 8), (6, 8))
    whole = [torch.randn(call.batch, ROWS, heads, width, generator=random) for heads, width in shapes]
    parallel = SequenceParallel(ulysses=2, mesh=group).holding(ROWS)
    mine = [shard(tensor.to(dtype), parallel).clone().requires_grad_() for tensor in whole]
    gate = shard(torch.randn(call.batch, ROWS, 12, 8, generator=random), parallel) if call.gate else None
    with grouped(ends):
        out = pa.attention(
            *mine, structure=call.structure, gate=gate, return_lse=not call.gate, parallel=parallel,
            deterministic=not call.gate, **call.arguments,
        )  # fmt: skip
    out, *lse = (out,) if call.gate else out
    for _ in range(1 + repeat):
        (out.float().sin().sum() + sum(each.cos().sum() for each in lse)).backward(retain_graph=repeat)
    return [out, *lse, *(tensor.grad for tensor in mine)]


def bits(group: dist.ProcessGroup, name: str, dtype: torch.dtype) -> list[tuple[bool, float]]:
    """Whether output and LSE have the bits of one group, and how far apart gradients are."""
    one, found = answers(group, (0, 0), name, dtype), []
    for ends in ENDS:
        several = answers(group, ends, name, dtype)
        same = [torch.equal(*pair) for pair in zip(one[:-3], several[:-3], strict=True)]
        apart = [(a - b).abs().max().item() for a, b in zip(one[-3:], several[-3:], strict=True)]
        found.append((all(same), max(apart)))
    return found


# What travels is copied, forward and backward, and heads know nothing of each other. sdpa's gradient of q is rounded as
# k's strides are, which differ with the number of heads.
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in ("dense", "causal", "tail padding", "documents", "mask of pairs")),
        ("video tiles", torch.float32),
        ("dense", torch.bfloat16),
    ],
    ids=str,
)
def test_groups_have_the_bits_of_one(pool: Pool, name: str, dtype: torch.dtype) -> None:
    close = 1e-6 if dtype == torch.float32 else 1e-2
    for found in pool.run(2, f"{HERE}:bits", name, dtype, limit=LIMIT):
        assert [same for same, _ in found] == [True] * len(ENDS)
        assert max(apart for _, apart in found) < close


def again(group: dist.ProcessGroup) -> bool:
    once, twice = (answers(group, (1, 1), "causal", torch.float32, repeat)[2:] for repeat in (False, True))
    return all(torch.equal(2 * one, two) for one, two in zip(once, twice, strict=True))


def test_a_graph_that_is_kept_gives_its_gradients_again(pool: Pool) -> None:
    assert pool.run(2, f"{HERE}:again", limit=LIMIT) == [True, True]


def schedule(group: dist.ProcessGroup, training: bool) -> tuple[list[str], list[str]]:
    """What this rank starts (>), waits for (<) and attends with, forward and backward."""
    events: list[str] = []
    journeys: list[Journey] = []
    begin, end, run = Journey.__init__, Journey.end, LocalCall.run

    def begun(journey: Journey, *args: Any) -> None:
        begin(journey, *args)
        assert journey._work is not None, "it goes on while this rank does something else"
        journeys.append(journey)
        events.append(f">{len(journeys) - 1}")

    def ended(journey: Journey) -> torch.Tensor:
        events.append(f"<{journeys.index(journey)}")
        return end(journey)

    def attended(call: LocalCall, q: torch.Tensor, *args: Any) -> Any:
        answer = run(call, q, *args)
        if training:
            events.append(f"attend {q.shape[2]}")
            answer[0].register_hook(lambda _: events.append(f"gradient {q.shape[2]}"))
        else:
            events.append(f"attend {q.shape[2]}")
        return answer

    q, k, v = (torch.randn(1, 6, 10, 8, requires_grad=training) for _ in range(3))
    with (
        grouped((1, 1)),
        patch.object(Journey, "__init__", begun),
        patch.object(Journey, "end", ended),
        patch.object(LocalCall, "run", attended),
    ):
        out = pa.attention(q, k, v, parallel=SequenceParallel(ulysses=2, mesh=group))
        forward = events.copy()
        events.clear()
        if training:
            out.sum().backward()
    return forward, events


@pytest.mark.parametrize("training", [False, True])
def test_two_groups_are_on_their_way_while_one_is_attended_with(pool: Pool, training: bool) -> None:
    expected = ["<0", "attend1", ">2", ">3", "<1", "attend3", ">4", "<2", "<3", "attend1", ">5", "<4", "<5"]
    for forward, backward in pool.run(2, f"{HERE}:schedule", training, limit=LIMIT):
        assert [event.replace(" ", "") for event in forward] == [">0", ">1", *expected]
        if training:
            # the last group's gradient leaves first; 7 is the middle group's, on its way while the last is computed
            assert [event.replace(" ", "") for event in backward] == (
                [
                    ">6",
                    ">7",
                    "<6",
                    "gradient1",
                    ">8",
                    ">9",
                    "<7",
                    "gradient3",
                    ">10",
                    "<8",
                    "<9",
                    "gradient1",
                    ">11",
                    "<10",
                    "<11",
                ]
            )


def most_bytes(group: dist.ProcessGroup, ends: Ends) -> int:
    """Bytes held at a time beside the caller's tensors and what slots allocate."""
    q, k, v = (torch.randn(1, 400, 12, 16) for _ in range(3))
    with grouped(ends), Allocations() as allocations:
        pa.attention(q, k, v, parallel=SequenceParallel(ulysses=2, mesh=group))
    return allocations.peak


def test_groups_need_less_memory_than_one(pool: Pool) -> None:
    one, three = (max(pool.run(2, f"{HERE}:most_bytes", ends, limit=LIMIT)) for ends in ((0, 0), (2, 2)))
    assert three < 0.85 * one


def differently(group: dist.ProcessGroup) -> str:
    q = torch.randn(1, 6, 12, 8)
    with grouped((dist.get_rank(group), 0)), pytest.raises(pa.UnsupportedRequest) as caught:
        pa.attention(q, q, q, parallel=SequenceParallel(ulysses=2, mesh=group))
    return str(caught.value)


def test_ranks_that_would_cut_otherwise_are_told_so_before_they_communicate(pool: Pool) -> None:
    one, other = pool.run(2, f"{HERE}:differently", limit=LIMIT)
    assert one == other
    assert "shared out" in one
