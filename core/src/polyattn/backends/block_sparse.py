"""BlockMap over any kernel of dense attention: only listed blocks of keys are computed."""

from __future__ import annotations

import torch

from polyattn.backends.blocked import compute_dtype
from polyattn.backends.calls import Kernel, Result, wants_grad, written
from polyattn.backends.listed import KeyBlocks, attend_listed, rows_of
from polyattn.structures.block_map import BlockMapMeta


def block_map(
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: BlockMapMeta,
    causal: bool,
    scale: float,
    window: None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A slot for "block_map" over `attend`: the whole query blocks, then the last one where it is smaller."""
    dtype, (batch, queries, heads, _) = q.dtype, q.shape
    if wants_grad(q, k, v):  # a key's gradient is a sum over all blocks that list it
        q, k, v = (x.to(compute_dtype(dtype)) for x in (q, k, v))
    lists, counts = meta.lists, meta.counts
    if lists.shape[3] == 0:
        lists = lists.new_full((*lists.shape[:3], 1), -1)
    lists, counts = lists.expand(batch, heads, -1, -1), counts.expand(batch, heads, -1)
    rows, blocks = rows_of(k, v), _key_blocks(meta, k.shape[1], lists.shape[3])
    whole, rest = divmod(queries, meta.block_q)
    pieces = []
    for first, number, size in ((0, whole, meta.block_q), (whole, 1, rest)):
        if number * size == 0:
            continue
        some = q.narrow(1, first * meta.block_q, number * size).unflatten(1, (number, size))
        listed, count = lists.narrow(2, first, number), counts.narrow(2, first, number)
        result, lse = attend_listed(attend, some, rows, listed, count, blocks, scale=scale, need_lse=need_lse)
        pieces.append((result.flatten(1, 2), None if lse is None else lse.flatten(2)))
    result = torch.cat([one for one, _ in pieces], dim=1).to(dtype)
    lse = torch.cat([one for _, one in pieces if one is not None], dim=2) if need_lse else None
    return written(out, result), lse


def _key_blocks(meta: BlockMapMeta, keys: int, width: int) -> KeyBlocks:
    starts = torch.arange(0, keys, meta.block_k, device=meta.lists.device)
    sizes = (keys - starts).clamp(max=meta.block_k)
    if meta.sizes is not None:
        sizes = torch.minimum(sizes, meta.sizes.clamp(min=0))
    return KeyBlocks(starts, sizes, -1, min(keys, width * meta.block_k))
