"""What does attention over several devices cost beside one, and beside the same strategies by hand and by libraries?

python benchmarks/cuda/distributed.py [--out DIR] [--small]      (as many ranks as there are devices)
torchrun --nproc-per-node 4 benchmarks/cuda/distributed.py [--out DIR] [--small]

Exposed time is T(n devices) minus T(the n-th part of the work on one device), of the same round of one run. Ulysses is
timed as the cost model cuts its heads into groups, as one group, which overlaps nothing, and in groups of other sizes.
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from unittest.mock import patch

import torch
import torch.distributed as dist
from _kernels import launched
from _ours import ours, route
from _ranks import RanksClock, beyond, everybody, join_ranks, start_ranks, waits
from _ranks_peers import diffusers, gather_by_hand, ring_flash_attn, ulysses_by_hand, yunchang
from _record import Asked, Record, arguments

from polyattn import explain
from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.bench.timing import Timings, interleaved
from polyattn.distributed import SequenceParallel, geometry, shard
from polyattn.distributed.cost import Cost, Ranks, Strategy, Work
from polyattn.distributed.cost_machines import H200
from polyattn.distributed.heads import Ends, split_heads
from polyattn.distributed.prices import in_groups, price
from polyattn.structures import Dense

Call = Callable[[], torch.Tensor]
Maker = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Call]

#: Rounds of each shape, and what two devices may expose of communication, in milliseconds.
ROUNDS = {"flux": 11, "wan480": 5, "wan720": 3}
MOST_EXPOSED = {"flux": 0.09, "wan480": 0.75, "wan720": 1.2}
#: Heads of the first and the last group, beside what the cost model chooses.
ENDS = ((1, 1), (2, 1), (4, 2), (5, 5))
#: Root mean square of the difference from one device's answer, over the answer's own: half precision is off by 0.01.
TOLERANCE = 0.05


def main() -> int:
    """Measure the three shapes; the record is written by the first rank, after each of them."""
    if "RANK" not in os.environ:
        return start_ranks(__file__, sys.argv[1:])
    join_ranks()
    asked = arguments(__doc__, seconds=8.0)
    ranks = dist.get_world_size()
    record = Record(f"attention over {ranks} devices beside one, by hand and by libraries", asked.small)
    clock = RanksClock(asked.device)
    with torch.inference_mode():
        for name, rounds in ROUNDS.items():
            measure(name, rounds, asked, record, clock)
            if dist.get_rank() == 0:
                with redirect_stdout(StringIO()):  # kept at once, told at the end
                    record.end(__file__, asked.out)
    code = record.end(__file__, asked.out) if dist.get_rank() == 0 else 0
    dist.destroy_process_group()
    return code


def measure(name: str, rounds: int, asked: Asked, record: Record, clock: RanksClock) -> None:
    """One shape: times, exposed time, efficiency, memory, waiting."""
    ranks = dist.get_world_size()
    torch.manual_seed(0)  # every rank draws the same, and takes its rows of it
    work = workload_of(name, asked.device, asked.dtype, small=asked.small)
    rows, heads = work.q.shape[1] // ranks * ranks, work.q.shape[2]
    q, k, v = (tensor[:, :rows].contiguous() for tensor in (work.q, work.k, work.v))
    parallel = SequenceParallel(ulysses=ranks)
    shards = [shard(tensor, parallel).contiguous() for tensor in (q, k, v)]
    few_heads = [tensor[:, :, : heads // ranks].contiguous() for tensor in (q, k, v)]
    alone: dict[str, Call] = {
        "one device": ours(q, k, v),
        "its heads alone": ours(*few_heads),
        "its rows alone": ours(shards[0], k, v),
    }
    mine = candidates(Work(rows, heads, q.shape[-1]), Ranks(ranks), shards)
    expected = shard(alone["one device"](), parallel)
    calls: dict[str, Call] = {}
    for label, candidate in mine.items():
        _offer(label, candidate.make, shards, expected, record.missing, calls)
    for label, make in peers(ranks).items():
        _offer(label, make, shards, expected, record.missing, calls)
    timings = interleaved({**alone, **calls}, clock, seconds=asked.seconds, rounds=rounds)
    exposed = {label: _exposed(timings, label) for label in calls}
    title = f"{name}: {SHAPES[name].title}, over {ranks} devices"
    record.compare(
        title,
        timings,
        "one device",
        rows=rows,
        exposed_milliseconds={label: float(f"{ms:.4g}") for label, ms in exposed.items()},
        efficiency={label: float(f"{1 / ranks / timings.ratio(label, 'one device'):.4g}") for label in calls},
        beyond_shard_bytes={label: beyond(call, asked.device) for label, call in calls.items()},
        waits_on_the_host={label: waits(call, asked.device) for label, call in calls.items() if label in mine},
        routes={label: route(call) for label, call in calls.items() if label in mine},
        kernels={label: launched(call, asked.device) for label, call in calls.items() if label in mine},
        model_milliseconds={label: float(f"{one.cost.seconds * 1e3:.4g}") for label, one in mine.items()},
        notes={label: one.notes for label, one in mine.items()},
    )
    best = min((exposed[label] for label in mine if label in exposed), default=None)
    limit = MOST_EXPOSED[name]
    record.target(f"{name}: exposed ms, the best strategy", best if ranks == 2 else None, at_most=limit)


@dataclass(frozen=True)
class Candidate:
    """One way of ours: how it is called, what `polyattn plan` says that it costs on H200s, and what `explain` tells."""

    make: Maker
    cost: Cost
    notes: tuple[str, ...] = ()


def candidates(work: Work, ranks: Ranks, shards: list[torch.Tensor]) -> dict[str, Candidate]:
    """Each exchange alone, Ulysses in other groups of heads, both halves of four devices, and what is left open."""
    total = ranks.total
    plain = [Strategy(ulysses=total), Strategy(gather=total), Strategy(ring=total)]
    if total % 4 == 0:
        plain += [Strategy(ulysses=total // 2, ring=2), Strategy(ulysses=total // 2, gather=2)]
    found = {}
    for strategy in plain:
        parallel = SequenceParallel(strategy.ulysses, strategy.ring, gather=strategy.gather)
        notes = explain(*shards, parallel=parallel).notes
        found[f"polyattn {strategy}"] = Candidate(_over(parallel), price(H200, work, ranks, strategy), notes)
    most = split_heads(work.heads, work.k_heads, total).fewest
    for first, last in ((0, 0), *ENDS):
        if first + last < most:
            told = f"first {first}, last {last} heads apart" if first + last else "one group of heads"
            cost = in_groups(H200, work, ranks, (first, last))
            found[f"polyattn ulysses {total}, {told}"] = Candidate(_over_groups(total, (first, last)), cost)
    left_open = SequenceParallel(ranks=total)
    notes = explain(*shards, parallel=left_open).notes
    chosen = notes[0].partition(": ")[2].partition(" (")[0]
    cheapest = min((one.cost for one in found.values()), key=lambda cost: cost.seconds)
    found[f"polyattn ranks={total}, which chose {chosen}"] = Candidate(_over(left_open), cheapest, notes)
    return found


def peers(ranks: int) -> Mapping[str, Maker]:
    """The others."""
    return {
        "ulysses by hand": ulysses_by_hand,
        "gather by hand": gather_by_hand,
        "yunchang ulysses": yunchang(ranks, 1),
        "yunchang ring": yunchang(1, ranks),
        "ring-flash-attn": ring_flash_attn,
        "diffusers ulysses": diffusers(ranks, 1),
        "diffusers ring": diffusers(1, ranks),
    }


def _over(parallel: SequenceParallel) -> Maker:
    return lambda q, k, v: ours(q, k, v, parallel=parallel)


def _over_groups(ranks: int, ends: Ends) -> Maker:
    """Ulysses in groups of these sizes, whatever the model says: its structure keeps the plan of the first call."""

    def make(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Call:
        call = ours(q, k, v, structure=Dense(), parallel=SequenceParallel(ulysses=ranks))
        with patch.object(geometry, "groups_of_heads", lambda *_: (ends, "as the benchmark says")):
            call()
        return call

    return make


def _offer(
    label: str,
    make: Maker,
    shards: list[torch.Tensor],
    expected: torch.Tensor,
    missing: dict[str, str],
    calls: dict[str, Call],
) -> None:
    """Keep a call that every rank can make and that answers what one device does; say why not otherwise."""
    problem, call = "", None
    try:
        call = make(*shards)
        answer = call()
        off = ((answer.float() - expected.float()).square().mean() / expected.float().square().mean()).sqrt().item()
        if not off <= TOLERANCE:
            problem = f"another answer: {off:.3g} of it away from one device's"
    except Exception as error:  # a peer that is missing or that refuses is told, and the others are compared
        problem = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    if everybody(not problem) and call is not None:
        calls[label] = call
    else:
        missing[f"{label}, {shards[0].shape[1]} rows a rank"] = problem or "another rank cannot make it"


def _exposed(timings: Timings, label: str) -> float:
    """Of strategies that share heads out, beside so many heads alone; of others beside so many rows."""
    base = "its heads alone" if "ulysses" in label else "its rows alone"
    return statistics.median(mine - its for mine, its in zip(timings.rounds[label], timings.rounds[base], strict=True))


if __name__ == "__main__":
    sys.exit(main())
