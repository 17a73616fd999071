"""BlockMap cases: kept blocks per sample and head, partial blocks, entries that name nothing."""

from __future__ import annotations

from typing import Any

from polyattn.structures import BlockMap
from polyattn.testing.cases.call import Call, edges
from polyattn.testing.cases.maker import PLAIN, Heads, Maker

BLOCK = 64


def block_map(
    make: Maker, heads: Heads = PLAIN, *, lists: Any = None, counts: Any = None, sizes: Any = None, **rule: Any
) -> Call:
    """Queries and keys in three blocks, the last one partial."""
    lists = [[0, 1, 2], [1, 2, 0], [2, 0, 0]] if lists is None else lists
    counts = [2, 3, 1] if counts is None else counts
    structure = BlockMap(
        make.integers(lists)[None, None],
        make.integers(counts)[None, None],
        BLOCK,
        BLOCK,
        None if sizes is None else make.integers(sizes),
    )
    return Call(*make.qkv((1, 2 * BLOCK + 30), (1, 2 * BLOCK + 30), heads), structure, **rule)


def per_head(make: Maker) -> Call:
    """Each head keeps its own blocks."""
    lists = make.integers([[[0, 1], [1, 2], [2, 0]], [[2, 0], [0, 0], [1, 2]]])
    counts = make.integers([[2, 1, 2], [1, 1, 2]])
    return Call(*make.qkv((1, 158), (1, 158)), BlockMap(lists[None], counts[None], BLOCK, BLOCK))


def nothing_kept(make: Maker) -> Call:
    """The second query block keeps no block."""
    return block_map(make, lists=[[0, 1, 2], [0, 0, 0], [2, 0, 0]], counts=[2, 0, 1])


def real_rows(make: Maker) -> Call:
    """Key blocks hold fewer real rows than their size."""
    return block_map(make, sizes=[64, 40, 30])


CASES = edges(
    "block_map",
    {"plain": block_map, "per_head": per_head, "nothing_kept": nothing_kept, "real_rows": real_rows},
)
