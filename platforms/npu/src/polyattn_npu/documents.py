"""Packed documents as Ascend's ops take them: rows with a key, keys that some row sees, their ends on the host."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch.nn.functional import pad

from polyattn.vendor import (
    TORCH_ROWS,
    PackedMeta,
    Result,
    Window,
    derived,
    empty_attention,
    positive_scale,
    written,
)
from polyattn_npu.bands import Band, band_of, window_sides


@dataclass(frozen=True)
class Documents:
    """The rows with a key and the keys that some row sees, document after document.

    ends_q, ends_k   where each document ends in them
    rows, keys       their places [n] int64 on the device; None: they are the first ones, in order
    longest          the most rows and keys of a document
    """

    ends_q: tuple[int, ...]
    ends_k: tuple[int, ...]
    rows: torch.Tensor | None
    keys: torch.Tensor | None
    longest: tuple[int, int]

    @property
    def lengths_q(self) -> tuple[int, ...]:
        return _lengths(self.ends_q)

    @property
    def lengths_k(self) -> tuple[int, ...]:
        return _lengths(self.ends_k)


class PackedOp(Protocol):
    """An op on documents: q [T,H,D], k and v as `parts` has them -> out [T,H,Dv], lse [H,T] | None.

    left, right    the window's sides; every row has a key and some row sees every key
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        parts: Documents,
        left: int | None,
        right: int | None,
        *,
        scale: float,
        need_lse: bool,
    ) -> Result: ...


def packed(
    op: PackedOp,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    causal: bool,
    scale: float,
    window: Window,
    need_lse: bool,
) -> Result:
    """Documents of lengths that the host knows, in one call of `op`; rows without a key never reach it."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    left, right = window_sides(causal, window)
    documents = documents_of(meta, left, right)
    if not documents.ends_q:
        result, lse = empty_attention(q, k, v, need_lse)
        return written(out, result), lse
    result, lse = op(
        gather(q, documents.rows, documents.ends_q[-1]), gather(k, documents.keys, documents.ends_k[-1]),
        gather(v, documents.keys, documents.ends_k[-1]), documents, left, right, scale=scale, need_lse=need_lse,
    )  # fmt: skip
    return scatter(result, lse, documents, out, q.shape[0])


def documents_of(meta: PackedMeta, left: int | None, right: int | None) -> Documents:
    """What of the documents takes part, for a window of these sides; derived once for all layers."""
    key = ("documents", left, right, meta.lengths_q, meta.lengths_k)
    return derived(meta, key, lambda: _documents_of(meta, left, right))


def gather(tensor: torch.Tensor, places: torch.Tensor | None, count: int) -> torch.Tensor:
    """Those rows of [T,H,D]: a view where they are the first ones."""
    if places is not None:
        return tensor.index_select(0, places)
    return tensor if count == tensor.shape[0] else tensor.narrow(0, 0, count)


def scatter(
    result: torch.Tensor, lse: torch.Tensor | None, documents: Documents, out: torch.Tensor | None, total: int
) -> Result:
    """Rows where they were among `total`, the others 0 and their LSE -inf."""
    if result.shape[0] == total:
        return written(out, result), lse
    if documents.rows is None:
        left = total - result.shape[0]
        lse = None if lse is None else pad(lse, (0, left), value=float("-inf"))
        if out is None:
            return pad(result, (0, 0, 0, 0, 0, left)), lse
        out.narrow(0, 0, result.shape[0]).copy_(result)
        out.narrow(0, result.shape[0], left).zero_()
        return out, lse
    rows, lse = TORCH_ROWS.unpack(result, lse, documents.rows, None if out is None else out.unsqueeze(0), 1, total)
    return rows.squeeze(0) if out is None else out, None if lse is None else lse.squeeze(0)


def _documents_of(meta: PackedMeta, left: int | None, right: int | None) -> Documents:
    """Leaving out rows before the first with a key, and keys before the first seen, moves no bottom-right diagonal."""
    assert meta.lengths_q is not None
    assert meta.lengths_k is not None
    ends_q, ends_k = accumulate(meta.lengths_q), accumulate(meta.lengths_k)
    parts = [
        (end_q - queries, end_k - keys, band)
        for queries, keys, end_q, end_k in zip(meta.lengths_q, meta.lengths_k, ends_q, ends_k, strict=True)
        if (band := band_of(queries, keys, left, right)) is not None
    ]
    rows = [(start + band.q_start, start + band.q_stop) for start, _, band in parts]
    keys = [(start + band.k_start, start + band.k_stop) for _, start, band in parts]
    device = meta.cu_q.device
    return Documents(
        _ends(rows), _ends(keys), _places(rows, device), _places(keys, device), _longest([band for *_, band in parts])
    )


def _ends(ranges: list[tuple[int, int]]) -> tuple[int, ...]:
    return tuple(accumulate(stop - start for start, stop in ranges))


def _lengths(ends: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(end - start for start, end in zip((0, *ends), ends, strict=False))


def _longest(bands: list[Band]) -> tuple[int, int]:
    return max((band.queries for band in bands), default=0), max((band.keys for band in bands), default=0)


def _places(ranges: list[tuple[int, int]], device: torch.device) -> torch.Tensor | None:
    """None where the ranges are one run from 0 on."""
    position = 0
    for start, stop in ranges:
        if start != position:
            break
        position = stop
    else:
        return None
    return torch.cat([torch.arange(start, stop, device="cpu") for start, stop in ranges]).to(device)
