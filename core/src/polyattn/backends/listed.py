"""Attention of query blocks over lists of key blocks: gathered a few at a time, so that memory stays bounded.

Only listed rows are read. Blocks of keys may differ in size: a list's rows are laid side by side, without gaps, and
what is missing up to the longest list of the same step is one spare row of zeros, hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from polyattn.backends.calls import Kernel, Result, wants_grad
from polyattn.structures.host_data import on_host

#: Numbers of gathered keys and values of one step: what stays in a host's caches; elsewhere, what fills a device.
_STEP_ON_HOST = 1 << 20
_STEP = 1 << 26


@dataclass(frozen=True)
class KeyBlocks:
    """Where key blocks lie: block j is rows [starts[j], starts[j] + sizes[j]) of the keys.

    starts, sizes  int64 [n]
    least, most    bounds of the rows of any list; equal: all lists have so many
    """

    starts: torch.Tensor
    sizes: torch.Tensor
    least: int
    most: int


@dataclass(frozen=True)
class Rows:
    """Keys and values with all samples and heads one after the other: [B*Hk*Sk + 1, D], the last row zeros."""

    k: torch.Tensor
    v: torch.Tensor
    kv_heads: int
    length: int


def rows_of(k: torch.Tensor, v: torch.Tensor) -> Rows:
    """k [B,Sk,Hk,D], v [B,Sk,Hk,Dv]."""
    keys, values = (torch.cat([t.transpose(1, 2).reshape(-1, t.shape[3]), t.new_zeros(1, t.shape[3])]) for t in (k, v))
    return Rows(keys, values, k.shape[2], k.shape[1])


def attend_listed(
    attend: Kernel,
    q: torch.Tensor,
    rows: Rows,
    lists: torch.Tensor,
    counts: torch.Tensor | None,
    blocks: KeyBlocks,
    *,
    scale: float,
    need_lse: bool,
) -> Result:
    """Query blocks q [B,N,s,H,D], lists [B,H,N,K] and counts [B,H,N] (None: K) -> out [B,N,s,H,Dv], lse [B,H,N,s].

    Entries past the count, and blocks that do not exist, list nothing. A block of queries that lists no row is 0, its
    LSE -inf.
    """
    batch, number, size, heads, _ = q.shape
    queries = q.permute(0, 3, 1, 2, 4).reshape(batch * heads * number, size, 1, -1)
    lists = lists.to(torch.int64).reshape(queries.shape[0], -1)
    counts = None if counts is None else counts.reshape(-1)
    order = None
    if counts is not None and on_host(counts):  # neighbours of like counts leave little to hide
        order = counts.argsort(stable=True)
        queries, lists, counts = (t.index_select(0, order) for t in (queries, lists, counts))
    owner = torch.arange(batch * heads, device=q.device).repeat_interleave(number)
    kv_owner = owner // heads * rows.kv_heads + owner % heads // (heads // rows.kv_heads)
    first = kv_owner * rows.length
    first = first if order is None else first.index_select(0, order)
    width = rows.k.shape[1] + rows.v.shape[1]
    per_list = max(1, blocks.most) * width
    step = max(1, (_STEP_ON_HOST if on_host(q) else _STEP) // per_list)
    run = partial(_step, attend, blocks, scale, need_lse)
    record = wants_grad(q, rows.k, rows.v) and step < queries.shape[0]
    outs: list[torch.Tensor] = []
    lses: list[torch.Tensor] = []
    for start in range(0, queries.shape[0], step):
        number_here = min(step, queries.shape[0] - start)
        q_here, lists_here, first_here = (t.narrow(0, start, number_here) for t in (queries, lists, first))
        counts_here = None if counts is None else counts.narrow(0, start, number_here)
        given = (q_here, rows.k, rows.v, lists_here, counts_here, first_here)
        out, lse = checkpoint(run, *given, use_reentrant=False, preserve_rng_state=False) if record else run(*given)
        outs.append(out)
        lses += [] if lse is None else [lse]
    out = _joined(outs, order).view(batch, heads, number, size, -1).permute(0, 2, 3, 1, 4)
    return out, _joined(lses, order).view(batch, heads, number, size) if need_lse else None


def _step(
    attend: Kernel,
    blocks: KeyBlocks,
    scale: float,
    need_lse: bool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: torch.Tensor,
    counts: torch.Tensor | None,
    first: torch.Tensor,
) -> Result:
    """q [P,s,1,D], lists [P,K], first [P]: the row of k where the keys of its sample and head begin."""
    at, seen = _listed_rows(blocks, lists, counts, first, k.shape[0] - 1)
    keys, values = (t.index_select(0, at.flatten()).view(*at.shape, 1, t.shape[1]) for t in (k, v))
    mask = None if seen is None else seen.unsqueeze(1).unsqueeze(1)
    out, lse = attend(q, keys, values, mask=mask, causal=False, scale=scale, softcap=0.0, need_lse=need_lse)
    return out.squeeze(2), None if lse is None else lse.squeeze(1)


def _listed_rows(
    blocks: KeyBlocks, lists: torch.Tensor, counts: torch.Tensor | None, first: torch.Tensor, spare: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """int64 [P,L]: the rows that each list names, side by side, then `spare`; and which are named (None: all)."""
    real = (lists >= 0) & (lists < blocks.sizes.shape[0])
    if counts is not None:
        real = real & (torch.arange(lists.shape[1], device=lists.device) < counts.unsqueeze(1))
    which = lists.clamp(0, blocks.sizes.shape[0] - 1)
    sizes = blocks.sizes.take(which).masked_fill(real.logical_not(), 0)
    ends = sizes.cumsum(dim=1)
    total = ends.narrow(1, ends.shape[1] - 1, 1)
    width, even = blocks.most, blocks.least == blocks.most
    if not even and on_host(total):
        width, least = int(total.max()), int(total.min())
        even = width == least
    place = torch.zeros_like(total) + torch.arange(max(1, width), device=lists.device)
    run = torch.searchsorted(ends, place, right=True).clamp(max=lists.shape[1] - 1)
    before = blocks.starts.take(which) - ends + sizes + first.unsqueeze(1)
    at = before.gather(1, run) + place
    if even and width:
        return at, None
    seen = place < total
    return at.where(seen, spare), seen


def _joined(pieces: list[torch.Tensor], order: torch.Tensor | None) -> torch.Tensor:
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return whole if order is None else whole.index_select(0, order.argsort())
