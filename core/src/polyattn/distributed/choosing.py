"""What the cost model chooses for a call: facts that all ranks have go in, and the same answer comes out on each.

The figures are those of the one machine that was measured (`cost_machines`), whatever machine this is: what is chosen
is then wrong by little where the balance of link and device is another, and never differs between ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyattn.distributed.balance import pairs_of
from polyattn.distributed.cost import Ranks, Work
from polyattn.distributed.cost_machines import H200
from polyattn.distributed.heads import Ends
from polyattn.distributed.parts import bands_of, why_whole
from polyattn.distributed.prices import groups_of, in_groups
from polyattn.distributed.rows import Split
from polyattn.structures import Structure, VideoTiles

if TYPE_CHECKING:
    from polyattn.distributed.geometry import Asked


def groups_of_heads(asked: Asked, structure: Structure | None, rows: tuple[Split, Split]) -> tuple[Ends, str]:
    """Into which groups a rank's heads are cut where all ranks exchange heads, and the reason, for a reader."""
    work, ranks = work_of(asked, structure, rows), ranks_of_hosts(asked)
    if not work.rows or not work.k_rows or not work.batch:
        return (0, 0), "nothing to attend to"
    ends = groups_of(H200, work, ranks)
    whole, cut = (in_groups(H200, work, ranks, each).seconds for each in ((0, 0), ends))
    if ends == (0, 0):
        return ends, "one group of heads: the call is too short, or has too few, to overlap exchange and attention"
    sizes = "first {}, last {} KV heads apart".format(*ends)
    return (
        ends,
        f"groups of heads ({sizes}) are exchanged while others are attended with, which spares {1 - cut / whole:.1%}",
    )


def work_of(asked: Asked, structure: Structure | None, rows: tuple[Split, Split]) -> Work:
    """The call as the cost model sees it."""
    q, k = (split.total for split in rows)
    heads, kv_heads = asked.heads
    width, v_width = asked.widths
    visible = _visible(asked, structure, q, k)
    return Work(q, heads, width, asked.batch, k, kv_heads, v_width, visible, asked.element)


def ranks_of_hosts(asked: Asked) -> Ranks:
    """The ranks on their hosts."""
    return Ranks(asked.per_host, asked.parallel.world_size // asked.per_host)


def _visible(asked: Asked, structure: Structure | None, q: int, k: int) -> float:
    """The share of pairs that are computed; the whole of them where only the device knows."""
    if isinstance(structure, VideoTiles) and structure.facts.video is not None:
        return structure.facts.video.kept / max(structure.facts.video.tiles, 1)
    if why_whole(structure) is not None or not q or not k or not asked.batch:
        return 1.0
    bands = bands_of(structure, asked.causal, asked.window, q, k)
    return pairs_of(bands, ((0, q),), ((0, k),), asked.batch) / (asked.batch * q * k)
