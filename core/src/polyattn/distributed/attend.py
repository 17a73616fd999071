"""Running one rank's plan: exchange heads for rows, attend, exchange back."""

from __future__ import annotations

import torch

from polyattn.distributed.chunks import packed, unpacked
from polyattn.distributed.gathering import gathered
from polyattn.distributed.geometry import Geometry
from polyattn.distributed.groups import Ranks
from polyattn.distributed.lanes import Lanes
from polyattn.distributed.local import LocalCall, answer, blanked
from polyattn.distributed.overlap import Answer, over_groups
from polyattn.distributed.parts import unanswered
from polyattn.distributed.peers import Peers
from polyattn.distributed.ring import ring
from polyattn.distributed.rows import size
from polyattn.structures import Structure
from polyattn.structures.base import keep
from polyattn.structures.video_gate import gated

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
    blank = _blank_rows(geometry, structure, lanes.q.shard.device)

    def at_place(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gate: torch.Tensor | None, mine: Structure | None
    ) -> Answer:
        if geometry.ring is not None:
            assert ranks is not None
            result: Answer = ring(call, geometry.ring, _peers(geometry, ranks), q, k, v, grad)
        elif geometry.parts is not None:
            if geometry.gathers:
                k, v = _everybodys(geometry, ranks, k, v)
            result = answer(call, geometry.parts, q, k, v, need_lse)
        else:
            with_gate = mine if gate is None else gated(mine, gate, q, k, v)
            result = call.run(q, k, v, with_gate, causal, window, need_lse)
        return blanked(*result, blank)

    if not geometry.exchanges:
        gate = None if lanes.gate is None else lanes.gate.whole()
        return at_place(lanes.q.whole(), lanes.k.whole(), lanes.v.whole(), gate, geometry.structure)
    assert ranks is not None
    return over_groups(
        geometry.exchanges, ranks.group, lanes, at_place, repeat=geometry.heads.repeat, need_lse=need_lse, grad=grad
    )


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
