"""Which keys each query row sees, as an interval of the kept keys, on the device and with no host read.

Causal, windows, documents, padding, spans and pages all have this form. It serves where lengths are known on a device
only, and where a kernel takes nothing but a mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from polyattn.structures.key_padding import KeyPaddingMeta
from polyattn.structures.lasting import lasting
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.paged import PagedMeta
from polyattn.structures.spans import SpansMeta, segments_of

Window = tuple[int | None, int | None] | None


@dataclass(frozen=True)
class Visibility:
    """Query row i of sample b sees key j iff first[b,i] <= j < last[b,i] and keep[b,j]; a row not asked sees nothing.

    first, last  int64 [B|1,Sq|1], first <= last
    keep         bool [B|1,Sk], or None: every key
    asked        bool [B,Sq], or None: every row
    keys         Sk
    """

    first: torch.Tensor
    last: torch.Tensor
    keep: torch.Tensor | None
    asked: torch.Tensor | None
    keys: int

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Bool [B|1,1,stop-start|1,Sk]: what query rows [start, stop) would see if all were asked."""
        key = torch.arange(self.keys, device=self.first.device)
        first, last = (t if t.shape[1] == 1 else t.narrow(1, start, stop - start) for t in (self.first, self.last))
        seen = (key >= first.unsqueeze(-1)) & (key < last.unsqueeze(-1))
        if self.keep is not None:
            seen = seen & self.keep.unsqueeze(1)
        return seen.unsqueeze(1)

    @cached_property
    @lasting
    def pairs(self) -> torch.Tensor:
        """Bool [B|1,1,Sq|1,Sk]: what every row would see if it were asked."""
        return self.rows(0, self.first.shape[1])

    @cached_property
    @lasting
    def mask(self) -> torch.Tensor:
        """Bool [B|1,1,Sq|1,Sk]: what every row sees."""
        return self.pairs if self.asked is None else self.pairs & self.asked.unsqueeze(1).unsqueeze(-1)

    @cached_property
    @lasting
    def seen_keys(self) -> torch.Tensor:
        """Bool [B|1,Sk]: keys that some query row sees (a kept key of its own row, where rows are not asked)."""
        # +1 where an interval opens and -1 where it closes: a key is covered where the running sum is positive
        steps = torch.zeros(self.first.shape[0], self.keys + 1, dtype=torch.int32, device=self.first.device)
        ones = torch.ones_like(self.first, dtype=torch.int32)
        steps = steps.scatter_add(1, self.first, ones).scatter_add(1, self.last, -ones)
        seen = steps.cumsum(dim=1).narrow(1, 0, self.keys) > 0
        return seen if self.keep is None else seen & self.keep

    @cached_property
    @lasting
    def blind_rows(self) -> torch.Tensor:
        """Bool [B|1,Sq|1]: query rows that are not asked or whose interval is empty."""
        blind = self.last == self.first
        return blind if self.asked is None else blind | self.asked.logical_not()


def of_positions(queries: int, keys: int, causal: bool, window: Window, device: torch.device) -> Visibility:
    """Causal and a window, bottom-right aligned."""
    rows = queries if causal or window is not None else 1  # without either, all rows are alike
    position = torch.arange(rows, device=device).unsqueeze(0) + (keys - queries)
    first, last = _interval(position, keys, causal, window)
    return Visibility(first, last, None, None, keys)


def of_key_padding(meta: KeyPaddingMeta, queries: int, keys: int, causal: bool, window: Window) -> Visibility:
    """Kept keys, at the positions of the tensors as passed; padded query rows of queries="same" are not asked."""
    base = of_positions(queries, keys, causal, window, meta.keep.device)
    return replace(base, keep=meta.keep, asked=None if meta.queries == "all" else meta.keep)


def of_spans(meta: SpansMeta, queries: int, keys: int) -> Visibility:
    """Spans are causal: every row sees a prefix of the keys."""
    last = meta.visible_end(queries, keys).to(torch.int64)
    return Visibility(torch.zeros_like(last), last, None, None, keys)


def of_packed(meta: PackedMeta, queries: int, keys: int, causal: bool, window: Window) -> Visibility:
    """Documents side by side in T rows; rows past the last boundary see nothing."""
    row = torch.arange(queries, device=meta.cu_q.device)
    if meta.cu_q.shape[0] == 1:  # not one document
        nothing = torch.zeros_like(row).unsqueeze(0)
        return Visibility(nothing, nothing, None, None, keys)
    document, inside = _document_of(row, meta.cu_q)
    start_q, end_q, start_k, end_k = (
        cu.to(torch.int64).index_select(0, document + step) for cu in (meta.cu_q, meta.cu_k) for step in (0, 1)
    )
    position = row - start_q + (end_k - start_k) - (end_q - start_q)
    first, last = _interval(position, end_k - start_k, causal, window)
    if meta.spans is not None and any(meta.spans):
        first, last = torch.zeros_like(first), _span_ends(meta, queries)
    first = (first + start_k).clamp(max=keys)
    last = torch.maximum((last + start_k).clamp(max=keys).where(inside, first), first)
    return Visibility(first.unsqueeze(0), last.unsqueeze(0), None, None, keys)


def of_paged_rows(
    meta: PagedMeta, queries: int, page_size: int, pages: int, causal: bool, window: Window
) -> Visibility:
    """Queries [B,Sq] over each row's own gathered pages [B, max_pages * page_size]."""
    keep = _page_keys(meta, page_size, pages)
    row = torch.arange(queries, device=keep.device).unsqueeze(0)
    lengths = meta.kv_lengths.to(torch.int64).unsqueeze(1)
    given = meta.q_lengths
    asked = torch.full_like(lengths, queries) if given is None else given.to(torch.int64).unsqueeze(1)
    first, last = _interval(row + lengths - asked, lengths, causal, window)
    first = first.clamp(max=keep.shape[1])
    last = torch.maximum(last.clamp(max=keep.shape[1]).where(row < asked, first), first)
    return Visibility(first, last, keep, None, keep.shape[1])


def of_paged_tokens(
    meta: PagedMeta, tokens: int, page_size: int, pages: int, causal: bool, window: Window
) -> Visibility:
    """Packed queries [T] over all rows' gathered pages, one after the other: [1, B * max_pages * page_size]."""
    keep = _page_keys(meta, page_size, pages)
    width = keep.shape[1]
    token = torch.arange(tokens, device=keep.device)
    row, inside = _document_of(token, meta.cu_q)
    ends = meta.cu_q.to(torch.int64)
    lengths = meta.kv_lengths.to(torch.int64).index_select(0, row)
    first, last = _interval(token - ends.index_select(0, row + 1) + lengths, lengths, causal, window)
    first = first.clamp(max=width) + row * width
    last = torch.maximum((last.clamp(max=width) + row * width).where(inside, first), first)
    return Visibility(first.unsqueeze(0), last.unsqueeze(0), keep.reshape(1, -1), None, keep.numel())


def _interval(
    position: torch.Tensor, keys: torch.Tensor | int, causal: bool, window: Window
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys [first, last) of `keys` that a query at `position` sees."""
    left, right = (None, None) if window is None else window
    right = 0 if causal else right
    zero = torch.zeros_like(position)
    limit = zero + keys
    first = zero if left is None else (position - left).clamp(min=0)
    last = limit if right is None else torch.minimum(position + right + 1, limit)
    first = torch.minimum(first, limit)
    return first, torch.maximum(last, first)


def _document_of(row: torch.Tensor, cu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The document of each row, and whether it is in one; rows past the last boundary say the last document."""
    ends = cu.narrow(0, 1, cu.shape[0] - 1).to(torch.int64)
    document = torch.searchsorted(ends, row, right=True)
    return document.clamp(max=ends.shape[0] - 1), row < ends.narrow(0, ends.shape[0] - 1, 1)


def _page_keys(meta: PagedMeta, page_size: int, pages: int) -> torch.Tensor:
    """Bool [B, max_pages * page_size]: slots within a row's length, on pages that exist."""
    table = meta.block_table
    exists = ((table >= 0) & (table < pages)).repeat_interleave(page_size, dim=1)
    return exists & (torch.arange(exists.shape[1], device=table.device) < meta.kv_lengths.unsqueeze(1))


def _span_ends(meta: PackedMeta, queries: int) -> torch.Tensor:
    """Per query row, the end of the keys it sees in its own document; spans are host data, and so are the lengths."""
    assert meta.spans is not None
    assert meta.lengths_q is not None
    assert meta.lengths_k is not None
    ends = torch.zeros(queries, dtype=torch.int64, device="cpu")
    start = 0
    for pairs, rows, keys in zip(meta.spans, meta.lengths_q, meta.lengths_k, strict=True):
        for part in segments_of(pairs, None, rows, keys):
            count = part.end - part.start
            first, last = part.kv_end - count + 1, part.kv_end + 1
            seen = torch.arange(first, last, device="cpu") if part.causal else part.kv_end
            ends[start + part.start : start + part.end] = seen
        start += rows
    return ends.clamp_(min=0).to(meta.cu_q.device)
