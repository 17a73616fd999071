"""Paged: keys and values in pages of a pool that a block table strings together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Meta, Structure
from polyattn.structures.host_data import (
    INT32_LIMIT,
    boundaries,
    integer_table,
    integer_tensor,
    lengths_of,
    on_host,
)
from polyattn.structures.intervals import Intervals, check_ends, intervals_of, rows_of, table_of
from polyattn.structures.lasting import lasting, normal
from polyattn.structures.transfer import refuse_in_capture, send

Lengths = tuple[int, ...]
Table = tuple[tuple[int, ...], ...]


class Paged(Structure):
    """Row b's keys are the first `kv_lengths[b]` slots of pages `block_table[b]`; entries past them are never read.

    block_table [batch, max_pages], kv_lengths and q_lengths [batch], integers. `kv_lengths` include the new tokens,
    which `PagedKVCache.write` put there before. q is [B,Sq,H,D], or packed [T,H,D] with `q_lengths`, or padded
    [B,Sq,H,D] with `q_lengths` (rows past them return 0). Queries are the last positions. `spans` gives each row's
    full spans, in its key positions, and makes it causal outside them.

    Data on the host are checked; int32 data on a device are referenced, and kernels read what they then hold.
    `check=True` reads device data once, now.

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
    host_table: Table | None
    host_kv: Lengths | None
    host_q: Lengths | None
    spans: tuple[Intervals, ...] | None
    spans_table: torch.Tensor | None

    def __init__(
        self, block_table: Any, kv_lengths: Any, q_lengths: Any = None, spans: Any = None, *, check: bool = False
    ) -> None:
        table, host_table = _table(block_table, check)
        kv, host_kv = _lengths("kv_lengths", kv_lengths, check)
        queries, host_q = (None, None) if q_lengths is None else _lengths("q_lengths", q_lengths, check)
        rows = table.shape[0]
        for name, given in (("kv_lengths", kv), ("q_lengths", queries)):
            if given is not None and given.shape[0] != rows:
                raise ValueError(f"{name}: one per row of block_table is needed, got {given.shape[0]} for {rows} rows")
        if host_q is not None and host_kv is not None:
            for row, (new, kept) in enumerate(zip(host_q, host_kv, strict=True)):
                if new > kept > 0:
                    raise ValueError(
                        f"kv_lengths: row {row} has {kept} keys for {new} queries; kv_lengths include the new tokens, "
                        "written before"
                    )
        pairs = None
        if spans is not None:
            if host_kv is None:
                raise ValueError("spans: paged rows with spans need kv_lengths on the host (or check=True)")
            pairs = intervals_of("spans", spans)
            check_ends("spans", pairs, host_kv)
        facts = StructureFacts(
            host=host_table is not None and host_kv is not None and (q_lengths is None or host_q is not None),
            documents=rows,
            spans=pairs is not None,
        )
        self._freeze(
            block_table=table, kv_lengths=kv, q_lengths=queries, host_table=host_table, host_kv=host_kv,
            host_q=host_q, spans=pairs, spans_table=table_of(pairs), facts=facts,
        )  # fmt: skip

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        rows = self.block_table.shape[0]
        if len(q_shape) == 3:
            if self.q_lengths is None:
                raise ValueError("q_lengths: packed queries [T,H,D] need q_lengths")
            if self.host_q is not None and sum(self.host_q) != q_shape[0]:
                raise ValueError(f"q_lengths: they sum to {sum(self.host_q)}, but q has T={q_shape[0]}")
        else:
            if q_shape[0] != rows:
                raise ValueError(f"block_table: {rows} rows are given, but q has batch {q_shape[0]}")
            if self.host_q is not None and max(self.host_q, default=0) > q_shape[1]:
                raise ValueError(f"q_lengths: {max(self.host_q)} is more than q's Sq={q_shape[1]}")
        if self.host_table is not None and self.host_kv is not None:
            _check_pages(self.host_table, self.host_kv, pages=k_shape[0], page_size=k_shape[1])

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> PagedMeta:
        return PagedMeta(
            send(self.block_table, device),
            send(self.kv_lengths, device),
            None if self.q_lengths is None else send(self.q_lengths, device),
            self.host_table,
            self.host_kv,
            self.host_q,
            self.spans,
        )

    def route_facts(self) -> Any:
        return self.kind, self.facts, self.q_lengths is not None

    def anchors(self) -> tuple[torch.Tensor, ...]:
        given = (self.block_table, self.kv_lengths, self.q_lengths, self.spans_table)
        return tuple(tensor for tensor in given if tensor is not None)

    def anchor_detail(self) -> str:
        return ("q" if self.q_lengths is not None else "") + ("s" if self.spans_table is not None else "")

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Paged:
        table, kept, *rest = tensors
        queries = rest.pop(0) if "q" in detail else None
        return cls(table, kept, queries, rows_of(rest[0], table.shape[0]) if "s" in detail else None)

    def stale(self) -> bool:
        known = self.host_table is not None or self.host_kv is not None or self.host_q is not None
        return known and super().stale()  # nothing is derived from data that only a device holds

    def __repr__(self) -> str:
        return f"Paged({list(self.block_table.shape)} block table, kv_lengths={self.host_kv}, q_lengths={self.host_q})"


@dataclass(frozen=True, eq=False)
class PagedMeta(Meta):
    """A block table on one device: block_table [B,max_pages], kv_lengths [B], q_lengths [B] or None, all int32.

    The `host_*` fields and `spans` exist where the host knows them. An entry that names no page of the pool hides
    its keys.
    """

    block_table: torch.Tensor
    kv_lengths: torch.Tensor
    q_lengths: torch.Tensor | None
    host_table: Table | None
    host_kv: Lengths | None
    host_q: Lengths | None
    spans: tuple[Intervals, ...] | None

    def complete(self) -> None:
        if self.q_lengths is not None:
            _ = self.cu_q

    @cached_property
    @lasting
    def cu_q(self) -> torch.Tensor:
        """int32 boundaries of the packed queries [B+1]; needs q_lengths, which must not change afterwards."""
        if self.host_q is not None:
            return send(boundaries(self.host_q), self.block_table.device)
        assert self.q_lengths is not None
        refuse_in_capture(self.q_lengths.device)
        return torch.nn.functional.pad(self.q_lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _check_pages(table: Table, lengths: Lengths, *, pages: int, page_size: int) -> None:
    for row, (entries, length) in enumerate(zip(table, lengths, strict=True)):
        needed = -(-length // page_size)
        if needed > len(entries):
            raise ValueError(
                f"block_table: row {row} needs {needed} pages for {length} keys, but has {len(entries)} entries"
            )
        read = entries[:needed]
        if max(read, default=-1) >= pages:
            slot, page = next((slot, page) for slot, page in enumerate(read) if page >= pages)
            raise ValueError(f"block_table: row {row} slot {slot} names page {page}, but the pool has {pages} pages")
        if min(read, default=0) < 0:
            slot, page = next((slot, page) for slot, page in enumerate(read) if page < 0)
            raise ValueError(f"block_table: row {row} slot {slot} is {page}, but {length} keys need a page there")


@lasting
def _table(data: Any, check: bool) -> tuple[torch.Tensor, Table | None]:
    shape = "[batch, max_pages]"
    if not (on_host(data) or check):
        return normal(integer_tensor("block_table", data, 2, shape).to(torch.int32)), None
    table = integer_table("block_table", data, shape)
    if isinstance(data, torch.Tensor):  # a table of a server's size, which lists would take milliseconds to rebuild
        return data.cpu().to(torch.int64).clamp(-1, INT32_LIMIT).to(torch.int32), table
    width = len(table[0]) if table else 0
    entries = torch.tensor([_int32(row) for row in table], dtype=torch.int32, device="cpu")
    return entries.reshape(len(table), width), table


def _int32(entries: tuple[int, ...]) -> tuple[int, ...]:
    """Entries as kernels may hold them: one that names no page keeps doing so, and never wraps around."""
    if min(entries, default=0) >= -1 and max(entries, default=0) <= INT32_LIMIT:
        return entries
    return tuple(min(max(entry, -1), INT32_LIMIT) for entry in entries)


@lasting
def _lengths(name: str, data: Any, check: bool) -> tuple[torch.Tensor, Lengths | None]:
    if not (on_host(data) or check):
        return normal(integer_tensor(name, data, 1, "[batch]").to(torch.int32)), None
    lengths = lengths_of(name, data, "[batch]")
    return torch.tensor(lengths, dtype=torch.int32, device="cpu"), lengths
