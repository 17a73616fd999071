"""Heads for rows, group by group: one is attended with while the next is on its way, and the last one's answer too.

At most two groups are on their way in either direction, so that buffers stay bounded; only the first one's way here and
the last one's way home are waited for with nothing to do. Backward it is the same, from the last group to the first. A
single group is exchanged, attended with and returned, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from polyattn.distributed.cost_overlap import AHEAD
from polyattn.distributed.exchange import Answers, Bundle, FromHeads, Road, Shards, ToHeads
from polyattn.distributed.lanes import Lane, Lanes
from polyattn.distributed.moves import Exchange, Kind, Moves
from polyattn.distributed.rows import Range
from polyattn.distributed.steps import Steps
from polyattn.structures import Structure

Answer = tuple[torch.Tensor, torch.Tensor | None]
#: Of a group's q, k, v, gate and the structure of its heads.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Structure | None], Answer]


def over_groups(
    exchanges: Sequence[Exchange],
    group: dist.ProcessGroup,
    lanes: Lanes,
    attend: Attend,
    *,
    repeat: int,
    need_lse: bool,
    grad: bool,
) -> Answer:
    """(out, LSE if needed) of the rows that this rank holds; `repeat`: how often KV heads are before they travel."""
    road, steps = Road(group, len(exchanges) > 1), Steps(grad)
    queries = [lanes.q] if lanes.gate is None else [lanes.q, lanes.gate]
    travelling = [*queries, *(_repeated(lane, repeat) for lane in (lanes.k, lanes.v))]
    shards, answers = Shards(), Answers()

    def gradients_given() -> tuple[torch.Tensor, ...]:
        answers.gradients = ()  # all groups have sent it, and the graph may live on
        return shards.given()

    steps.take(shards.taken, gradients_given, *(lane.shard for lane in travelling))
    coming = [ToHeads(_bundles(exchange, travelling), road, shards) for exchange in exchanges]
    going = [FromHeads(exchange.out, road, answers) for exchange in exchanges]
    for here in coming[:AHEAD]:
        steps.take(here.leave, here.gradients_arrive)
    for number, (exchange, here, home) in enumerate(zip(exchanges, coming, going, strict=True)):
        q, *gate, k, v = _filled(here.bundles, steps.take(here.arrive, here.gradients_leave), travelling)
        out, lse = attend(q, k, v, gate[0] if gate else None, exchange.structure)
        del q, k, v, gate  # the next group's buffers may lie there
        mine = [out] if lse is None or not need_lse else [out, lse.transpose(1, 2).unsqueeze(-1)]
        steps.take(home.leave, home.gradients_arrive, *mine)
        del out, lse, mine
        for later in coming[number + AHEAD : number + AHEAD + 1]:
            steps.take(later.leave, later.gradients_arrive)
        for earlier in going[max(number - 1, 0) : number]:
            steps.take(earlier.arrive, earlier.gradients_leave)
    shards.tensors = ()
    steps.take(going[-1].arrive, going[-1].gradients_leave)
    out, *more = steps.take(answers.given, answers.taken)
    return out, more[0].squeeze(-1).transpose(1, 2) if more else None


def _repeated(lane: Lane, times: int) -> Lane:
    if times == 1:
        return lane
    before, (shard,), after = (
        tuple(tensor.repeat_interleave(times, dim=2) for tensor in tensors)
        for tensors in (lane.before, (lane.shard,), lane.after)
    )
    return Lane(before, shard, after)


def _bundles(exchange: Exchange, lanes: list[Lane]) -> list[Bundle]:
    """q, the gate, k and v in one where they have the same rows, else keys apart."""
    queries, keys = lanes[:-2], lanes[-2:]
    kinds: tuple[Kind, ...] = tuple("q" for _ in queries)
    if exchange.together:
        return [_bundle(exchange.q, lanes, (*kinds, "kv", "kv"))]
    return [_bundle(exchange.q, queries, kinds), _bundle(exchange.k, keys, ("kv", "kv"))]


def _bundle(moves: Moves, lanes: list[Lane], kinds: tuple[Kind, ...]) -> Bundle:
    return Bundle(moves, kinds, max(lane.lead for lane in lanes), max(lane.trail for lane in lanes))


def _filled(bundles: Sequence[Bundle], buffers: Sequence[torch.Tensor], lanes: list[Lane]) -> list[torch.Tensor]:
    """What was exchanged, with the rows beside it that every rank holds."""
    left, found = iter(lanes), []
    for bundle, buffer in zip(bundles, buffers, strict=True):
        mine = [next(left) for _ in bundle.kinds]
        views = bundle.views(buffer, [lane.shard.shape[-1] for lane in mine])
        rows, moves = bundle.moves.attended_total, bundle.moves
        for view, lane, kind in zip(views, mine, bundle.kinds, strict=True):
            if not bundle.lead and not bundle.trail:
                found.append(view)
                continue
            view = view.narrow(1, bundle.lead - lane.lead, lane.lead + rows + lane.trail)
            heads = (moves.heads.q if kind == "q" else moves.heads.kv)[moves.seat]
            _fill(view, lane.before, 0, heads)
            _fill(view, lane.after, lane.lead + rows, heads)
            found.append(view)
    return found


def _fill(view: torch.Tensor, parts: tuple[torch.Tensor, ...], at: int, heads: Range) -> None:
    for part in parts:
        if part.shape[1]:
            view[:, at : at + part.shape[1]] = part[:, :, heads[0] : heads[1]]
        at += part.shape[1]
