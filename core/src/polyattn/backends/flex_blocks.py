"""Who sees what, as flex attention takes it: a rule over indices, and which blocks of scores it leaves empty or full.

Blocks are told from intervals and reductions, on the device and without a host read; no mask of all pairs is made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

if TYPE_CHECKING:
    from polyattn.backends.visibility import Visibility

#: Query rows and keys of a block: flex attention's own default, which its tiles divide.
BLOCK = 128

#: (sample, head, query row, key) -> may attend, over index tensors.
Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Blocks(NamedTuple):
    """What a `BlockMask` is made of, apart: made inside a compiled program, it leaves the lengths open.

    rule    makes the rule of `facts`
    tables  of the blocks that are visible in part and whole, by query and by key: how many, and which
    traits  what of the tensors a program cannot leave open: axes of size 1, and those that are broadcast
    """

    rule: Callable[..., Rule]
    facts: tuple[torch.Tensor, ...]
    tables: tuple[torch.Tensor, ...]
    traits: Hashable

    def mask(self, queries: int, keys: int) -> BlockMask:
        """As flex attention takes it."""
        return block_mask(self.rule, self.facts, self.tables, queries, keys)


def block_mask(
    rule: Callable[..., Rule],
    facts: tuple[torch.Tensor, ...],
    tables: tuple[torch.Tensor, ...],
    queries: int,
    keys: int,
) -> BlockMask:
    """The parts of `Blocks` put together."""
    kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices = tables[:4]
    q_num_blocks, q_indices, full_q_num_blocks, full_q_indices = tables[4:]
    return BlockMask(
        seq_lengths=(queries, keys), kv_num_blocks=kv_num_blocks, kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_num_blocks, full_kv_indices=full_kv_indices, q_num_blocks=q_num_blocks,
        q_indices=q_indices, full_q_num_blocks=full_q_num_blocks, full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=rule(*facts),
    )  # fmt: skip


def of_visibility(seen: Visibility, batch: int, queries: int) -> Blocks:
    """The blocks of what a `Visibility` says, for `batch` samples of `queries` rows."""
    first, last = _intervals(seen, batch, queries)
    some, every = _blocks_of_intervals(first, last, seen.keys)
    if seen.keep is None:
        return _blocks(some, every, _within, first, last)
    keep = seen.keep.expand(batch, -1)
    kept = pad(keep, (0, -seen.keys % BLOCK)).unflatten(1, (-1, BLOCK))
    some = some & kept.any(-1).unsqueeze(1).unsqueeze(1)
    every = every & kept.all(-1).unsqueeze(1).unsqueeze(1)
    return _blocks(some, every, _kept_within, first, last, keep)


def of_mask(mask: torch.Tensor, seen: Visibility | None, shape: tuple[int, int, int, int]) -> Blocks:
    """The blocks of a bool mask [B|1,H|1,Sq|1,Sk], within a `Visibility` where there is one; `shape` is [B,H,Sq,Sk]."""
    batch, _, queries, keys = shape
    some, every = _blocks_of_mask(mask, queries)
    whole = mask.contiguous().expand(*shape[:2], max(queries, 2), keys)
    if seen is None:
        return _blocks(some, every, _masked, whole)
    first, last = _intervals(seen, batch, queries)
    near, inside = _blocks_of_intervals(first, last, keys)
    return _blocks(some & near, every & inside, _masked_within, whole, first, last)


def _within(first: torch.Tensor, last: torch.Tensor) -> Rule:
    def rule(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j >= first[b, i]) & (j < last[b, i])

    return rule


def _kept_within(first: torch.Tensor, last: torch.Tensor, keep: torch.Tensor) -> Rule:
    def rule(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return (j >= first[b, i]) & (j < last[b, i]) & keep[b, j]

    return rule


def _masked(mask: torch.Tensor) -> Rule:
    def rule(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return mask[b, h, i, j]

    return rule


def _masked_within(mask: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Rule:
    def rule(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return mask[b, h, i, j] & (j >= first[b, i]) & (j < last[b, i])

    return rule


def _intervals(seen: Visibility, batch: int, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 [B,Sq] each, one a row; rows that are not asked see an empty one. One query has a second beside it."""
    shape = (batch, queries)
    last = seen.last if seen.asked is None else seen.last.where(seen.asked, seen.first)
    first, last = _int32(seen.first.expand(shape)), _int32(last.expand(shape))
    return (first, last) if queries > 1 else (pad(first, (0, 1)), pad(last, (0, 1)))


def _blocks_of_intervals(first: torch.Tensor, last: torch.Tensor, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Bool [B,1,query blocks,key blocks]: blocks that may hold a visible pair, and blocks that are visible whole."""
    spare = -first.shape[1] % BLOCK
    sees = last > first
    # a row that sees nothing, or lies past the last one, opens no block and lets none be whole
    opens = pad(first.where(sees, keys), (0, spare), value=keys).unflatten(1, (-1, BLOCK))
    closes = pad(last.where(sees, 0), (0, spare), value=0).unflatten(1, (-1, BLOCK))
    start = torch.arange(0, keys, BLOCK, device=first.device, dtype=first.dtype)
    some = (start < closes.amax(-1, keepdim=True)) & (start + BLOCK > opens.amin(-1, keepdim=True))
    every = (start >= opens.amax(-1, keepdim=True)) & (start + BLOCK <= closes.amin(-1, keepdim=True))
    return some.unsqueeze(1), every.unsqueeze(1)


def _blocks_of_mask(mask: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `_blocks_of_intervals`, [B|1,H|1,query blocks,key blocks]."""
    by_key = pad(mask, (0, -mask.shape[3] % BLOCK)).unflatten(3, (-1, BLOCK))
    some, every = by_key.any(-1), by_key.all(-1)
    blocks = -(-queries // BLOCK)
    if mask.shape[2] == 1:
        some, every = some.expand(-1, -1, blocks, -1), every.repeat(1, 1, blocks, 1)
        if queries % BLOCK:
            every.narrow(2, blocks - 1, 1).zero_()
        return some, every
    rows = (0, 0, 0, -queries % BLOCK)
    return (
        pad(some, rows).unflatten(2, (-1, BLOCK)).any(3),
        pad(every, rows).unflatten(2, (-1, BLOCK)).all(3),
    )


def _blocks(some: torch.Tensor, every: torch.Tensor, rule: Callable[..., Rule], *facts: torch.Tensor) -> Blocks:
    # two each way at least, the spare ones empty: torch would compile another program for one
    spare = (0, max(0, 2 - some.shape[3]), 0, max(0, 2 - some.shape[2]))
    some, every = pad(some, spare), pad(every, spare)
    partly = some & every.logical_not()
    tables = (
        *_listed(partly), *_listed(every), *_listed(partly.transpose(2, 3)), *_listed(every.transpose(2, 3))
    )  # fmt: skip
    traits = tuple(
        (size == 1, stride == 0)
        for tensor in (*facts, partly)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    for tensor in (*facts, *tables):
        leave_open(tensor, range(tensor.dim()))
    return Blocks(rule, facts, tables, traits)


def leave_open(tensor: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
    """The same tensor, marked for torch's compiler: these sizes vary. A size of 1 does not, to torch."""
    for axis in axes:
        if tensor.shape[axis] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, axis)
    return tensor


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many of a row of blocks are set, and their places, the set ones first."""
    places = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), _int32(places)


def _int32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.int32, memory_format=torch.contiguous_format)
