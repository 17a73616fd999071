"""`polyattn plan`: what each strategy over many ranks is expected to cost, by the cost model; nothing is measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from polyattn.bench.shapes import SHAPES, workload_of
from polyattn.cli.failure import UsageError
from polyattn.cli.report import Section, show, show_json
from polyattn.distributed.cost import Cost, Machine, Ranks, Strategy, Work, alone
from polyattn.distributed.cost_machines import ASSUMED, H200
from polyattn.distributed.prices import price, strategies, why_not

#: Shapes that are planned for if none is named.
DEFAULT_SHAPES = ("flux", "wan480", "wan720")
#: What the model is known to be off by; strategies that are closer to each other are not told apart.
ERROR = 0.15
#: Ranks at most: every division of them is priced, and no group is larger.
MOST_RANKS = 2**20
_SPENT_ON = {
    "attention": "attention (emptier waves)",
    "waiting": "latency and launches",
    "moving": "bytes on the links",
    "copying": "copies and merges",
}
_HEADER = ("strategy", "ms", "attention", "links", "copies", "speed-up", "sent, MB", "beyond shard, MB")

Priced = tuple[Strategy, Cost]


@dataclass(frozen=True)
class Wanted:
    """What the user asks for. q, k: a shape of one's own; None of a machine's figures: an H200's."""

    shapes: tuple[str, ...] = ()
    q: tuple[int, ...] | None = None
    k: tuple[int, ...] | None = None
    per_host: int = 8
    hosts: tuple[int, ...] = (1, 8, 64)
    tflops: float | None = None
    inside: float | None = None
    across: float | None = None


def plan(wanted: Wanted, *, as_json: bool) -> int:
    """Reckon and tell; 0, or UsageError where a shape cannot be shared out."""
    if wanted.per_host * max(wanted.hosts) > MOST_RANKS:
        raise UsageError(
            f"--ranks-per-host, --hosts: {wanted.per_host} x {max(wanted.hosts)} are more than {MOST_RANKS} ranks"
        )
    machine = _machine(wanted)
    works = {"asked": _work_of(wanted)} if wanted.q is not None else {}
    works |= {name: work_of(name) for name in wanted.shapes or (() if works else DEFAULT_SHAPES)}
    facts = {
        "machine": asdict(machine),
        "assumed": ASSUMED,
        "error": ERROR,
        "shapes": {
            name: {
                "title": SHAPES[name].title if name in SHAPES else "as given",
                "work": asdict(work),
                "milliseconds_alone": _ms(alone(machine, work).seconds),
                "ranks": [_ranks_facts(machine, work, Ranks(wanted.per_host, hosts)) for hosts in wanted.hosts],
            }
            for name, work in works.items()
        },
    }
    if as_json:
        show_json(facts)
    else:
        show(sections_of(facts))
    return 0


def work_of(name: str) -> Work:
    """A named shape; UsageError where ranks cannot share it."""
    if name not in SHAPES:
        raise UsageError(f"--shape {name}: there are {', '.join(SHAPES)}")
    made = workload_of(name, torch.device("meta"), torch.bfloat16, small=False)
    if made.structure is not None and made.structure.kind == "paged":
        raise UsageError(f"--shape {name}: paged caches are not shared out over ranks")
    batch, rows = made.q.shape[:2] if made.q.dim() == 4 else (1, made.q.shape[0])
    keys = made.k.shape[-3]
    return Work(
        rows, made.q.shape[-2], made.q.shape[-1], batch, keys, made.k.shape[-2], made.v.shape[-1],
        visible=made.pairs / (batch * rows * keys),
    )  # fmt: skip


def sections_of(facts: dict[str, Any]) -> list[Section]:
    """For people: who wins and why, then the best of each kind of strategy for every number of ranks."""
    winners, tables, refused = [], [], []
    for name, shape in facts["shapes"].items():
        for ranks in shape["ranks"]:
            best = ranks["strategies"][0]
            said = (best["strategy"], f"{best['milliseconds']:.4g}", f"{best['speed_up']:.3g}", ranks["why"])
            winners.append((name, str(ranks["total"]), *said))
            title = f"{name} on {ranks['total']} ranks ({ranks['hosts']} x {ranks['per_host']}): {shape['title']}"
            tables.append(Section(title, [_row(one) for one in _best_of_kinds(ranks["strategies"])], _HEADER))
            refused += [(name, str(ranks["total"]), *one) for one in _refused(ranks["refused"])]
    machine = facts["machine"]
    links = " and ".join(f"{machine[link]['bytes_per_second'] / 1e9:g} GB/s {link}" for link in ("inside", "across"))
    told = [
        (f"{machine['name']}: {machine['flops'] / 1e12:g} TFLOP/s of attention, {links} hosts, for each rank",),
        (facts["assumed"],),
        (f"the model is right to about {facts['error']:.0%}; measure what is closer",),
    ]
    header = ("shape", "ranks", "strategy", "ms", "speed-up", "why")
    return [Section("fastest", winners, header), *tables, Section("cannot be", refused), Section("model", told)]


def why_first(first: Priced, second: Priced | None) -> str:
    """Why the fastest is: by what the next kind of strategy takes longer, or that the model cannot tell."""
    if second is None:
        return "there is no other"
    later = second[1].seconds - first[1].seconds
    if later < ERROR * first[1].seconds:
        return f"too close to call: {second[0]} is within {max(later / first[1].seconds, 0):.1%}"
    costs = {name: getattr(second[1], name) - getattr(first[1], name) for name in _SPENT_ON}
    most = max(costs, key=lambda name: costs[name])
    return f"{second[0]} takes {_ms(later):.3g} ms more, {_ms(costs[most]):.3g} of them {_SPENT_ON[most]}"


def _ranks_facts(machine: Machine, work: Work, ranks: Ranks) -> dict[str, Any]:
    possible = [one for one in strategies(ranks) if why_not(work, ranks, one) is None]
    priced = sorted(
        ((one, price(machine, work, ranks, one)) for one in possible), key=lambda one: (one[1].seconds, str(one[0]))
    )
    first = priced[0]
    second = next((one for one in priced if one[0].family != first[0].family), None)
    refused = {str(one): why for one in strategies(ranks) if (why := why_not(work, ranks, one)) is not None}
    one_rank = alone(machine, work).seconds
    return {
        "per_host": ranks.per_host,
        "hosts": ranks.hosts,
        "total": ranks.total,
        "fastest": str(first[0]),
        "why": why_first(first, second) if first[1].seconds < one_rank else "one rank alone is faster",
        "strategies": [_cost_facts(one, cost, one_rank) for one, cost in priced],
        "refused": refused,
    }


def _cost_facts(strategy: Strategy, cost: Cost, one_rank: float) -> dict[str, Any]:
    return {
        "strategy": str(strategy),
        "kind": strategy.family,
        "degrees": asdict(strategy),
        "milliseconds": _ms(cost.seconds),
        "attention_milliseconds": _ms(cost.attention),
        "waiting_milliseconds": _ms(cost.waiting),
        "moving_milliseconds": _ms(cost.moving),
        "copying_milliseconds": _ms(cost.copying),
        "speed_up": float(f"{one_rank / cost.seconds:.4g}"),
        "sent_bytes_a_rank": round(cost.sent),
        "bytes_beyond_shard": round(cost.memory),
    }


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    links = one["waiting_milliseconds"] + one["moving_milliseconds"]
    times = (one["milliseconds"], one["attention_milliseconds"], links, one["copying_milliseconds"])
    sizes = (one["sent_bytes_a_rank"] / 1e6, one["bytes_beyond_shard"] / 1e6)
    return (
        one["strategy"],
        *(f"{time:.4g}" for time in times),
        f"{one['speed_up']:.3g}",
        *(f"{size:.4g}" for size in sizes),
    )


def _refused(refused: dict[str, str]) -> list[tuple[str, ...]]:
    if not refused:
        return []
    name, why = next(iter(refused.items()))
    others = f", and {len(refused) - 1} more divisions likewise" if len(refused) > 1 else ""
    return [(name, f"{why}{others}")]


def _best_of_kinds(strategies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    best: dict[str, dict[str, Any]] = {}
    for one in strategies:
        best.setdefault(one["kind"], one)
    return list(best.values())


def _machine(wanted: Wanted) -> Machine:
    machine = H200
    if wanted.tflops is not None:
        machine = replace(machine, name="as given", flops=wanted.tflops * 1e12)
    for name in ("inside", "across"):
        given = getattr(wanted, name)
        if given is not None:
            machine = replace(machine, **{name: replace(getattr(machine, name), bytes_per_second=given * 1e9)})
    return machine


def _work_of(wanted: Wanted) -> Work:
    q, k = wanted.q, wanted.k or wanted.q
    assert q is not None
    assert k is not None
    for name, shape in (("--q", q), ("--k", k)):
        if len(shape) != 4 or 0 in shape:
            raise UsageError(f"{name}: B,S,H,D, each at least 1, is needed, got {','.join(map(str, shape))}")
    if k[0] != q[0] or k[3] != q[3] or q[2] % k[2]:
        raise UsageError("--k: q's batch and width, and a number of heads that divides q's, are needed")
    return Work(q[1], q[2], q[3], q[0], k[1], k[2])


def _ms(seconds: float) -> float:
    return float(f"{seconds * 1e3:.5g}")
