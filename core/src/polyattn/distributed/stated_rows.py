"""How many rows each rank holds: from what the caller states, the global structure, or this rank's own tensor."""

from __future__ import annotations

from polyattn.distributed.parallel import SequenceParallel
from polyattn.distributed.rows import Split
from polyattn.structures import KeyPadding, Mask, Packed, Structure, VideoTiles


def structure_rows(structure: Structure | None) -> tuple[int | None, int | None]:
    """(query rows, key rows) of the glued sequence, where a structure says how long it is."""
    if isinstance(structure, KeyPadding):
        keys = structure.keep.shape[1]
        return (None if structure.queries == "all" else keys), keys
    if isinstance(structure, Mask):
        queries, keys = structure.tensor.shape[2:]
        return (queries if queries > 1 else None), keys
    if isinstance(structure, Packed) and structure.lengths_q is not None and structure.lengths_k is not None:
        return structure.totals or (sum(structure.lengths_q), sum(structure.lengths_k))
    if isinstance(structure, VideoTiles) and structure.layout.used is None:
        return structure.layout.rows, structure.layout.rows
    return None, None


def told_exactly(structure: Structure | None) -> bool:
    """Whether those rows are all there are: rows may follow the last of packed documents."""
    return not isinstance(structure, Packed) or structure.totals is not None


def split_of(
    parallel: SequenceParallel,
    side: str,
    ends: tuple[int, int],
    held: int,
    rank: int,
    told: int | None,
    told_exactly: bool,
) -> Split:
    """The split of one side ("q" or "k"); ValueError where this rank holds other rows than it should.

    ends: rows before and after the shards that every rank holds; `held`: those of this rank's shard; `told`: rows of
    the glued sequence, as the structure says, `told_exactly` unless there may be more.
    """
    spread = None if told is None else told - sum(ends)
    if spread is not None and spread < 0 and not told_exactly:
        spread = None  # what is described ends among the rows that every rank holds
    if spread is not None and spread < 0:
        raise ValueError(f"structure: {told} rows of {side} are described, but every rank holds {sum(ends)} of them")
    stated = parallel.rows if side == "q" or parallel.kv_rows is None else parallel.kv_rows
    of_queries = side == "k" and parallel.kv_rows is None
    if stated is not None and of_queries and spread is not None:
        total = stated if isinstance(stated, int) else sum(stated)
        if spread > total or (spread < total and told_exactly):
            stated = None  # the rows are the queries', and the structure says that there are other keys
    if stated is not None:
        shares = parallel.shares(stated) if isinstance(stated, int) else stated
    elif spread is not None:
        shares = parallel.shares(spread)
    else:
        shares = (held,) * parallel.world_size
    if shares[rank] != held:
        named = "rows" if side == "q" or of_queries else "kv_rows"
        source = "structure" if stated is None else f"parallel.{named}"
        raise ValueError(
            f"{source}: rank {rank} should hold {shares[rank]} of {sum(shares)} rows of {side}, but holds {held}; "
            "state the rows of each rank, SequenceParallel(rows=, kv_rows=) or parallel.holding(...)"
        )
    return Split(ends[0], shares, ends[1])
