"""Paged: keys and values in pages of a pool that a block table strings together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure
from polyattn.structures.host_data import boundaries, host_integers, integer_tensor, lengths_of, on_host, pairs_of
from polyattn.structures.spans import Pairs, check_spans

Lengths = tuple[int, ...]


class PagedKVCache:
    """A pool of pages: `k` [pages, page_size, Hk, D] and `v` [pages, page_size, Hk, Dv].

    >>> import torch, polyattn as pa
    >>> cache = pa.PagedKVCache(4, 2, 1, 8, torch.float32, "cpu")
    >>> cache.write(torch.ones(3, 1, 8), torch.ones(3, 1, 8), torch.tensor([2, 3, -1]))
    >>> cache.k[1].sum().item()
    16.0
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        v_head_dim: int | None = None,
    ) -> None:
        for name, size in (("num_pages", num_pages), ("page_size", page_size)):
            if size < 1:
                raise ValueError(f"{name}: at least 1 is needed, got {size}")
        shape = (num_pages, page_size, num_kv_heads)
        self.k = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.v = torch.zeros(*shape, head_dim if v_head_dim is None else v_head_dim, dtype=dtype, device=device)

    @property
    def page_size(self) -> int:
        return self.k.shape[1]

    @property
    def num_pages(self) -> int:
        return self.k.shape[0]

    def write(self, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        """Write rows k [T,Hk,D], v [T,Hk,Dv] at `slots` [T] (page*page_size + offset; negative = skip), in place.

        Slots on the host are checked; on a device, slots past the pool are skipped.
        """
        rows = self.num_pages * self.page_size
        for name, given, pool in (("k", k, self.k), ("v", v, self.v)):
            if given.shape[1:] != pool.shape[2:] or given.dtype != pool.dtype or given.device != pool.device:
                raise ValueError(
                    f"{name}: rows of {list(pool.shape[2:])} {pool.dtype} on {pool.device} are needed, "
                    f"got {list(given.shape)} {given.dtype} on {given.device}"
                )
        integer_tensor("slots", slots, 1)
        if not k.shape[0] == v.shape[0] == slots.shape[0]:
            raise ValueError(f"slots: one per row is needed, got {slots.shape[0]} for k {k.shape[0]} and v {v.shape[0]} rows")
        if on_host(slots) and slots.numel() and int(slots.max()) >= rows:
            raise ValueError(f"slots: {int(slots.max())} is past the pool's {rows} rows ({self.num_pages} pages of {self.page_size})")
        valid = (slots >= 0) & (slots < rows)
        if on_host(slots):
            kept = valid.nonzero().squeeze(1)
            target = slots.to(torch.int64)[kept].to(self.k.device)
            for given, pool in ((k, self.k), (v, self.v)):
                pool.view(rows, *pool.shape[2:]).index_copy_(0, target, given.index_select(0, kept.to(given.device)))
            return
        # without reading the slots back: skipped rows rewrite what row 0 of their target holds already
        target = slots.to(torch.int64).clamp(0, rows - 1)
        for given, pool in ((k, self.k), (v, self.v)):
            flat = pool.view(rows, *pool.shape[2:])
            _write_valid(flat, given, target, valid)


class Paged(Structure):
    """Row b's keys are the first `kv_lengths[b]` slots of pages `block_table[b]`; entries past them are never read.

    `kv_lengths` include the new tokens, which `PagedKVCache.write` put there before. q is [B,Sq,H,D], or packed
    [T,H,D] with `q_lengths`, or padded [B,Sq,H,D] with `q_lengths` (rows past them return 0). Queries are the last
    positions. `spans` gives each row's full spans, in its key positions.

    >>> import torch, polyattn as pa
    >>> cache = pa.PagedKVCache(4, 2, 1, 8, torch.float32, "cpu")
    >>> q = torch.randn(1, 1, 1, 8)
    >>> pa.attention(q, cache.k, cache.v, structure=pa.Paged([[2, 0]], [3])).shape
    torch.Size([1, 1, 1, 8])
    """

    kind: ClassVar[str] = "paged"
    block_table: torch.Tensor
    kv_lengths: torch.Tensor
    q_lengths: torch.Tensor | None
    host_table: tuple[tuple[int, ...], ...] | None
    host_kv: Lengths | None
    host_q: Lengths | None
    spans: Pairs | None

    def __init__(self, block_table: Any, kv_lengths: Any, q_lengths: Any = None, spans: Any = None, *, check: bool = False) -> None:
        host_table = host_integers("block_table", block_table, 2) if on_host(block_table) or check else None
        host_kv = lengths_of("kv_lengths", kv_lengths) if on_host(kv_lengths) or check else None
        host_q = None if q_lengths is None or not (on_host(q_lengths) or check) else lengths_of("q_lengths", q_lengths)
        table = _as_int32("block_table", block_table, 2, host_table)
        lengths = _as_int32("kv_lengths", kv_lengths, 1, host_kv)
        queries = None if q_lengths is None else _as_int32("q_lengths", q_lengths, 1, host_q)
        rows = table.shape[0]
        for name, given in (("kv_lengths", lengths), ("q_lengths", queries)):
            if given is not None and given.shape[0] != rows:
                raise ValueError(f"{name}: one per row of block_table is needed, got {given.shape[0]} for {rows} rows")
        if host_q is not None and host_kv is not None:
            for row, (new, kept) in enumerate(zip(host_q, host_kv, strict=True)):
                if new > kept and kept > 0:
                    raise ValueError(
                        f"kv_lengths: row {row} has {kept} keys for {new} queries; kv_lengths include the new tokens, written before"
                    )
        pairs = None if spans is None else pairs_of("spans", spans)
        if pairs is not None:
            if host_kv is None:
                raise ValueError("spans: paged rows with spans need kv_lengths on the host")
            check_spans(pairs, host_kv)
        facts = StructureFacts(
            host=host_table is not None and host_kv is not None and (q_lengths is None or host_q is not None),
            documents=rows,
            spans=pairs is not None and any(pairs),
        )
        self._freeze(
            block_table=table, kv_lengths=lengths, q_lengths=queries, host_table=host_table, host_kv=host_kv,
            host_q=host_q, spans=pairs, facts=facts,
        )  # fmt: skip

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        rows = self.block_table.shape[0]
        if len(q_shape) == 3 and self.q_lengths is None:
            raise ValueError("q_lengths: packed queries [T,H,D] need q_lengths")
        if len(q_shape) == 3 and self.host_q is not None and sum(self.host_q) != q_shape[0]:
            raise ValueError(f"q_lengths: they sum to {sum(self.host_q)}, but q has T={q_shape[0]}")
        if len(q_shape) == 4:
            if q_shape[0] != rows:
                raise ValueError(f"block_table: {rows} rows are given, but q has batch {q_shape[0]}")
            if self.host_q is not None and max(self.host_q, default=0) > q_shape[1]:
                raise ValueError(f"q_lengths: {max(self.host_q)} is more than q's Sq={q_shape[1]}")
        if self.host_table is not None and self.host_kv is not None:
            _check_pages(self.host_table, self.host_kv, pages=k_shape[0], page_size=k_shape[1])
        elif self.host_table is not None:
            for row, entries in enumerate(self.host_table):
                if max(entries, default=0) >= k_shape[0]:
                    raise ValueError(f"block_table: row {row} names page {max(entries)}, but the pool has {k_shape[0]} pages")

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> PagedMeta:
        queries = None if self.q_lengths is None else self.q_lengths.to(device)
        return PagedMeta(
            self.block_table.to(device), self.kv_lengths.to(device), queries,
            self.host_table, self.host_kv, self.host_q, self.spans,
        )  # fmt: skip

    def anchors(self) -> tuple[torch.Tensor, ...]:
        tensors = (self.block_table, self.kv_lengths)
        return tensors if self.q_lengths is None else (*tensors, self.q_lengths)

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Paged:
        return cls(*tensors)

    def __repr__(self) -> str:
        return f"Paged({list(self.block_table.shape)} block table, kv_lengths={self.host_kv}, q_lengths={self.host_q})"


@dataclass(frozen=True)
class PagedMeta:
    """A block table on one device: block_table [B,max_pages], kv_lengths [B], q_lengths [B] or None, all int32.

    The `host_*` fields and `spans` exist where the host knows them.
    """

    block_table: torch.Tensor
    kv_lengths: torch.Tensor
    q_lengths: torch.Tensor | None
    host_table: tuple[tuple[int, ...], ...] | None
    host_kv: Lengths | None
    host_q: Lengths | None
    spans: Pairs | None

    @cached_property
    def cu_q(self) -> torch.Tensor:
        """int32 boundaries of the packed queries [B+1]; needs q_lengths."""
        if self.host_q is not None:
            return boundaries(self.host_q).to(self.block_table.device)
        assert self.q_lengths is not None
        return torch.nn.functional.pad(self.q_lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _check_pages(table: tuple[tuple[int, ...], ...], lengths: Lengths, *, pages: int, page_size: int) -> None:
    for row, (entries, length) in enumerate(zip(table, lengths, strict=True)):
        needed = -(-length // page_size)
        if needed > len(entries):
            raise ValueError(f"block_table: row {row} needs {needed} pages for {length} keys, but has {len(entries)} entries")
        for slot, page in enumerate(entries):
            if page >= pages:
                raise ValueError(f"block_table: row {row} slot {slot} names page {page}, but the pool has {pages} pages")
            if slot < needed and page < 0:
                raise ValueError(f"block_table: row {row} slot {slot} is {page}, but {length} keys need a page there")


def _as_int32(name: str, data: Any, rank: int, host: Any) -> torch.Tensor:
    if isinstance(data, torch.Tensor):
        return integer_tensor(name, data, rank).to(torch.int32)
    if rank == 2 and not host:
        return torch.empty(0, 0, dtype=torch.int32)
    return torch.tensor(host, dtype=torch.int32).reshape((len(host), -1) if rank == 2 else (-1,))


def _write_valid(pool: torch.Tensor, rows: torch.Tensor, target: torch.Tensor, valid: torch.Tensor) -> None:
    """`pool[target[i]] = rows[i]` where valid[i], with no host read: invalid rows are sent to a spare row."""
    spare = pool.shape[0]
    where = torch.where(valid, target, spare)
    extended = torch.cat((pool, pool[:1]))
    extended.index_copy_(0, where, rows)
    pool.copy_(extended[:spare])
