"""The slots of `fia` over paged KV: block tables and lengths that the host knows; spans by pieces of the queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from polyattn.vendor import PagedMeta, Result, SpansMeta, derived, positive_scale, written
from polyattn_npu.bands import sparse
from polyattn_npu.fia_operator import SIDES, attend_pages
from polyattn_npu.fia_rows import blanked, gathered, places, spread, unseeing_rows
from polyattn_npu.samples import EMPTY_ROWS_ARE_ZERO, no_softcap


class Asked(NamedTuple):
    """One call's queries and pages: q [B,S,H,D], pools [pages,page_size,Hk*D], table int32 [B,max_pages], lengths."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_heads: int
    table: torch.Tensor
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]

    def sample(self, row: int, rows: tuple[int, int], keys: int) -> Asked:
        """Query rows [start, stop) of one sample, over its first `keys` keys."""
        start, stop = rows
        return self._replace(
            q=self.q.narrow(0, row, 1).narrow(1, start, stop - start),
            table=self.table.narrow(0, row, 1), lengths_q=(stop - start,), lengths_k=(keys,),
        )  # fmt: skip


def paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    causal: bool,
    scale: float,
    window: None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Queries [B,S,H,D], padded or not, or packed [T,H,D], over pages that are read where they are."""
    no_softcap(softcap)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    asked = _asked(q, k, v, meta)
    page_size = k.shape[1]
    if sum(-(-length // page_size) for length in asked.lengths_k) <= k.shape[0]:
        result, lse = _attend(asked, causal, page_size, scale, need_lse)
    else:  # rows that share pages: the op wants as many pages in the pool as all rows have
        samples = range(asked.q.shape[0])
        pieces = [
            _attend(asked.sample(row, (0, asked.q.shape[1]), asked.lengths_k[row])._replace(
                lengths_q=(asked.lengths_q[row],)), causal, page_size, scale, need_lse)
            for row in samples
        ]  # fmt: skip
        result = torch.cat([piece for piece, _ in pieces])
        lse = torch.cat([lse for _, lse in pieces if lse is not None]) if need_lse else None
    width = asked.q.shape[1]
    key = ("unseeing", causal, width, asked.lengths_q)
    seeing = [_seeing(queries, keys, causal) for queries, keys in zip(asked.lengths_q, asked.lengths_k, strict=True)]
    unseeing = derived(meta, key, lambda: unseeing_rows(seeing, width, q.device))
    result, lse = blanked(result, lse, unseeing, None)
    return _in_layout(result, lse, q, meta, out)


def paged_spans(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    causal: bool,
    scale: float,
    window: None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A call for each piece of a row's queries inside or outside its spans, over pages written once before."""
    no_softcap(softcap)
    assert meta.spans is not None
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    asked = _asked(q, k, v, meta)
    batch, width, heads = asked.q.shape[:3]
    result = q.new_zeros(batch, width, heads, v.shape[-1])
    lse = q.new_full((batch, heads, width), float("-inf"), dtype=torch.float32) if need_lse else None
    spans = derived(meta, "spans", lambda: SpansMeta(meta.spans or (), None, q.device))
    for row, (queries, keys) in enumerate(zip(asked.lengths_q, asked.lengths_k, strict=True)):
        for start, stop, seen, diagonal in spans.segments(row, queries, keys):
            blind, _ = _seeing(stop - start, seen, diagonal) if seen > 0 else (stop - start, 0)
            if start + blind >= stop:
                continue
            piece = asked.sample(row, (start + blind, stop), seen)
            part, part_lse = _attend(piece, diagonal, k.shape[1], scale, need_lse)
            result[row, start + blind : stop].copy_(part[0])
            if lse is not None and part_lse is not None:
                lse[row, :, start + blind : stop].copy_(part_lse[0])
    return _in_layout(result, lse, q, meta, out)


def _asked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: PagedMeta) -> Asked:
    assert meta.host_kv is not None
    if q.dim() == 3:
        assert meta.host_q is not None
        width = max(meta.host_q, default=0)
        q = spread(q, _places(meta, width), len(meta.host_q), width)
    lengths_q = (q.shape[1],) * q.shape[0] if meta.host_q is None else meta.host_q
    return Asked(q, k.flatten(2), v.flatten(2), k.shape[2], meta.block_table, lengths_q, meta.host_kv)


def _places(meta: PagedMeta, width: int) -> torch.Tensor:
    lengths = meta.host_q or ()
    return derived(meta, ("places", width), lambda: places(lengths, width, meta.block_table.device))


def _attend(asked: Asked, causal: bool, page_size: int, scale: float, need_lse: bool) -> Result:
    q = asked.q
    rule: dict[str, Any] = sparse(q.shape[1], max(asked.lengths_k), None, 0 if causal else None, q.device, SIDES)
    if rule:
        rule["inner_precise"] = EMPTY_ROWS_ARE_ZERO
    return attend_pages(
        q, asked.k, asked.v, asked.kv_heads, scale=scale, need_lse=need_lse, block_table=asked.table,
        block_size=page_size, actual_seq_lengths=list(asked.lengths_q), actual_seq_lengths_kv=list(asked.lengths_k),
        **rule,
    )  # fmt: skip


def _seeing(queries: int, keys: int, causal: bool) -> tuple[int, int]:
    """The half-open range of a sample's query rows that see a key."""
    if keys == 0:
        return 0, 0
    return (max(0, queries - keys) if causal else 0), queries


def _in_layout(
    result: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, meta: PagedMeta, out: torch.Tensor | None
) -> Result:
    """As q came: packed rows again where they were packed."""
    if q.dim() == 3:
        result, lse = gathered(result, lse, _places(meta, result.shape[1]))
    return written(out, result), lse
