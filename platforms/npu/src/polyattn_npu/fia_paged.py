"""The slots of `fia` over paged KV: block tables and lengths that the host knows; spans by pieces of the queries."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from polyattn.vendor import PagedMeta, Result, SpansMeta, derived, positive_scale, warn, written
from polyattn_npu.bands import sparse_mode_args
from polyattn_npu.batched import EMPTY_ROWS_ARE_ZERO, no_softcap
from polyattn_npu.fia_operator import WINDOW_ARGS, attend_pages
from polyattn_npu.padded_rows import blank, pad_rows, places, rows_with_a_key, unpad_rows


class PagedCall(NamedTuple):
    """One call's queries and pages: q [B,S,H,D], pools [pages,page_size,Hk*D], table int32 [B,max_pages], lengths."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    kv_heads: int
    table: torch.Tensor
    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]

    def piece(self, row: int, rows: tuple[int, int], keys: int, used: int | None = None) -> PagedCall:
        """Query rows [start, stop) of one sample, of which the first `used` count (None: all), over its first keys."""
        start, stop = rows
        return self._replace(
            q=self.q.narrow(0, row, 1).narrow(1, start, stop - start), table=self.table.narrow(0, row, 1),
            lengths_q=(stop - start if used is None else used,), lengths_k=(keys,),
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
    call = _call(q, k, v, meta)
    width, page_size = call.q.shape[1], k.shape[1]
    if sum(-(-length // page_size) for length in call.lengths_k) <= k.shape[0]:
        result, lse = _over_pages(call, causal, page_size, scale, need_lse)
    else:
        result, lse = _row_by_row(call, causal, page_size, scale, need_lse)
    key = ("with a key", causal, width, call.lengths_q)
    kept = derived(meta, key, lambda: _rows_with_a_key(call.lengths_q, call.lengths_k, causal, width, q.device))
    blank(result, lse, kept)
    return _in_layout(result, lse, q, meta, out)


def _row_by_row(call: PagedCall, causal: bool, page_size: int, scale: float, need_lse: bool) -> Result:
    """Rows that share pages, a call each: the op wants as many pages in the pool as all its rows have together."""
    _tell_once()
    pieces = [
        _over_pages(call.piece(row, (0, call.q.shape[1]), keys, used), causal, page_size, scale, need_lse)
        for row, (used, keys) in enumerate(zip(call.lengths_q, call.lengths_k, strict=True))
    ]
    result = torch.cat([piece for piece, _ in pieces])
    return result, torch.cat([lse for _, lse in pieces if lse is not None]) if need_lse else None


@lru_cache(maxsize=1)
def _tell_once() -> None:
    warn(
        "npu:fia reads pages that rows share by a call for each row: npu_fused_infer_attention_score wants as many "
        "pages in the pool as all rows of a call have; a pool of that many pages makes it one call"
    )


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
    call = _call(q, k, v, meta)
    batch, width, heads = call.q.shape[:3]
    result = q.new_zeros(batch, width, heads, v.shape[-1])
    lse = q.new_full((batch, heads, width), float("-inf"), dtype=torch.float32) if need_lse else None
    spans = derived(meta, "spans", lambda: SpansMeta(meta.spans or (), None, q.device))
    for row, (queries, keys) in enumerate(zip(call.lengths_q, call.lengths_k, strict=True)):
        for start, stop, seen, diagonal in spans.segments(row, queries, keys):
            skipped, _ = _with_a_key(stop - start, seen, diagonal) if seen > 0 else (stop - start, 0)
            if start + skipped >= stop:
                continue
            piece = call.piece(row, (start + skipped, stop), seen)
            part, part_lse = _over_pages(piece, diagonal, k.shape[1], scale, need_lse)
            result[row, start + skipped : stop].copy_(part[0])
            if lse is not None and part_lse is not None:
                lse[row, :, start + skipped : stop].copy_(part_lse[0])
    return _in_layout(result, lse, q, meta, out)


def _call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, meta: PagedMeta) -> PagedCall:
    assert meta.host_kv is not None
    if q.dim() == 3:
        assert meta.host_q is not None
        width = max(meta.host_q, default=0)
        q = pad_rows(q, _places(meta, width), len(meta.host_q), width)
    lengths_q = (q.shape[1],) * q.shape[0] if meta.host_q is None else meta.host_q
    return PagedCall(q, k.flatten(2), v.flatten(2), k.shape[2], meta.block_table, lengths_q, meta.host_kv)


def _places(meta: PagedMeta, width: int) -> torch.Tensor:
    lengths = meta.host_q or ()
    return derived(meta, ("places", width), lambda: places(lengths, width, meta.block_table.device))


def _over_pages(call: PagedCall, causal: bool, page_size: int, scale: float, need_lse: bool) -> Result:
    q = call.q
    right = 0 if causal else None
    rule = sparse_mode_args(q.shape[1], max(call.lengths_k), None, right, q.device, WINDOW_ARGS)
    if rule:
        rule["inner_precise"] = EMPTY_ROWS_ARE_ZERO
    return attend_pages(
        q, call.k, call.v, call.kv_heads, scale=scale, need_lse=need_lse, block_table=call.table,
        block_size=page_size, actual_seq_lengths=list(call.lengths_q), actual_seq_lengths_kv=list(call.lengths_k),
        **rule,
    )  # fmt: skip


def _rows_with_a_key(
    lengths_q: tuple[int, ...], lengths_k: tuple[int, ...], causal: bool, width: int, device: torch.device
) -> torch.Tensor | None:
    ranges = [_with_a_key(queries, keys, causal) for queries, keys in zip(lengths_q, lengths_k, strict=True)]
    return rows_with_a_key(ranges, width, device)


def _with_a_key(queries: int, keys: int, causal: bool) -> tuple[int, int]:
    """The half-open range of a sample's query rows with a key."""
    if keys == 0:
        return 0, 0
    return (max(0, queries - keys) if causal else 0), queries


def _in_layout(
    result: torch.Tensor, lse: torch.Tensor | None, q: torch.Tensor, meta: PagedMeta, out: torch.Tensor | None
) -> Result:
    """As q came: packed rows again where they were packed."""
    if q.dim() == 3:
        result, lse = unpad_rows(result, lse, _places(meta, result.shape[1]))
    return written(out, result), lse
