"""Running one rank's plan: exchange heads for rows, attend, exchange back."""

from __future__ import annotations

import torch

from polyattn.distributed.chunks import packed, unpacked
from polyattn.distributed.exchange import Bundle, from_heads, to_heads
from polyattn.distributed.gathering import gathered
from polyattn.distributed.geometry import Geometry
from polyattn.distributed.groups import Ranks
from polyattn.distributed.lanes import Lane, Lanes
from polyattn.distributed.local import LocalCall, answer, blanked
from polyattn.distributed.moves import Kind, Moves
from polyattn.distributed.parts import unanswered
from polyattn.distributed.peers import Peers
from polyattn.distributed.ring import ring
from polyattn.distributed.rows import Range, size
from polyattn.structures import Structure
from polyattn.structures.base import keep
from polyattn.structures.video_gate import gated

Answer = tuple[torch.Tensor, torch.Tensor | None]

#: (rows, device) of the blank rows that a structure keeps.
_BLANK_LIMIT = 16


def attend(
    geometry: Geometry,
    ranks: Ranks | None,
    call: LocalCall,
    lanes: Lanes,
    structure: Structure | None,
    causal: bool,
    window: object,
    need_lse: bool,
    grad: bool,
) -> Answer:
    """(out [B, held rows, H, Dv], lse [B, H, held rows] or None) of this rank's query rows."""
    q, k, v, gate = _to_place(geometry, ranks, lanes)
    if geometry.ring is not None:
        assert ranks is not None
        result: Answer = ring(call, geometry.ring, _peers(geometry, ranks), q, k, v, grad)
    elif geometry.parts is not None:
        if geometry.gathers:
            k, v = _everybodys(geometry, ranks, k, v)
        result = answer(call, geometry.parts, q, k, v, need_lse)
    else:
        mine = geometry.structure if gate is None else gated(geometry.structure, gate, q, k, v)
        result = call.run(q, k, v, mine, causal, window, need_lse)
    out, lse = blanked(*result, _blank_rows(geometry, structure, q.device))
    if geometry.out_moves is None:
        return out, lse
    assert ranks is not None
    answers = [out] if lse is None or not need_lse else [out, lse.transpose(1, 2).unsqueeze(-1)]
    out, *more = from_heads(answers, geometry.out_moves, ranks.group)
    return out, more[0].squeeze(-1).transpose(1, 2) if more else None


def _to_place(
    geometry: Geometry, ranks: Ranks | None, lanes: Lanes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """q, k, v and the gate with the rows and heads that this rank attends with."""
    if geometry.q_moves is None:
        own_gate = None if lanes.gate is None else lanes.gate.whole()
        return lanes.q.whole(), lanes.k.whole(), lanes.v.whole(), own_gate
    assert geometry.k_moves is not None
    assert geometry.spread is not None
    assert ranks is not None
    queries = [lanes.q] if lanes.gate is None else [lanes.q, lanes.gate]
    keys = [_repeated(lane, geometry.heads.repeat) for lane in (lanes.k, lanes.v)]
    q_kinds: tuple[Kind, ...] = ("q",) if lanes.gate is None else ("q", "q")
    if geometry.spread.q.shards == geometry.spread.k.shards:
        bundles = [_bundle(geometry.q_moves, [*queries, *keys], (*q_kinds, "kv", "kv"))]
    else:
        bundles = [_bundle(geometry.q_moves, queries, q_kinds), _bundle(geometry.k_moves, keys, ("kv", "kv"))]
    exchanged = [*queries, *keys]
    views = iter(to_heads(bundles, [lane.shard for lane in exchanged], ranks.group))
    left = iter(exchanged)
    q, *gate, k, v = (_filled(next(views), next(left), kind, bundle) for bundle in bundles for kind in bundle.kinds)
    return q, k, v, gate[0] if gate else None


def _repeated(lane: Lane, times: int) -> Lane:
    if times == 1:
        return lane
    before, (shard,), after = (
        tuple(tensor.repeat_interleave(times, dim=2) for tensor in tensors)
        for tensors in (lane.before, (lane.shard,), lane.after)
    )
    return Lane(before, shard, after)


def _bundle(moves: Moves, lanes: list[Lane], kinds: tuple[Kind, ...]) -> Bundle:
    return Bundle(moves, kinds, max(lane.lead for lane in lanes), max(lane.trail for lane in lanes))


def _filled(view: torch.Tensor, lane: Lane, kind: Kind, bundle: Bundle) -> torch.Tensor:
    """What was exchanged, with the rows beside it that every rank holds."""
    moves = bundle.moves
    rows = sum(moves.attended_rows)
    view = view.narrow(1, bundle.lead - lane.lead, lane.lead + rows + lane.trail)
    heads = (moves.heads.q if kind == "q" else moves.heads.kv)[moves.seat]
    _fill(view, lane.before, 0, heads)
    _fill(view, lane.after, lane.lead + rows, heads)
    return view


def _fill(view: torch.Tensor, parts: tuple[torch.Tensor, ...], at: int, heads: Range) -> None:
    for part in parts:
        if part.shape[1]:
            view[:, at : at + part.shape[1]] = part[:, :, heads[0] : heads[1]]
        at += part.shape[1]


def _peers(geometry: Geometry, ranks: Ranks) -> Peers:
    """The ranks that compute the same heads as this one, one at each place."""
    spread = geometry.spread
    assert spread is not None
    seat = ranks.rank % spread.ulysses
    return Peers(ranks.group, ranks.members[seat :: spread.ulysses], spread.place(ranks.rank))


def _everybodys(
    geometry: Geometry, ranks: Ranks | None, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of all places, in global order."""
    spread = geometry.spread
    assert spread is not None
    assert ranks is not None
    lead, trail = spread.k.lead, spread.k.trail
    sizes = tuple(size(spread.block(spread.k, place)) for place in range(spread.places))
    mine = k.shape[1] - lead - trail
    chunk = packed(*(tensor.narrow(1, lead, mine) for tensor in (k, v)))
    whole = unpacked(
        gathered(chunk, sizes, _peers(geometry, ranks), lead, trail), k.shape[2], (k.shape[-1], v.shape[-1])
    )
    for everything, own in zip(whole, (k, v), strict=True):
        if lead:
            everything[:, :lead] = own[:, :lead]
        if trail:
            everything[:, -trail:] = own[:, -trail:]
    return whole


def _blank_rows(geometry: Geometry, structure: Structure | None, device: torch.device) -> torch.Tensor | None:
    if geometry.blank is None or structure is None:
        return None
    cache, key = structure.parts, ("blank", geometry.blank, device)
    if key not in cache:
        keep(cache, _BLANK_LIMIT, key, unanswered(structure, geometry.blank, device))
    rows: torch.Tensor | None = cache[key]
    return rows
