"""Packed documents as Ascend's ops take them: rows that see a key, keys that some row sees, their ends on the host."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from polyattn.vendor import TORCH_ROWS, PackedMeta, Result, derived, written
from polyattn_npu.bands import Band, band_of


class Documents(NamedTuple):
    """The rows that see a key and the keys that some row sees, document after document.

    ends_q, ends_k   where each document ends in them
    rows, keys       their places [n] int64 on the device; None: they are the first ones, in order
    longest          the most rows and keys of a document
    """

    ends_q: tuple[int, ...]
    ends_k: tuple[int, ...]
    rows: torch.Tensor | None
    keys: torch.Tensor | None
    longest: tuple[int, int]


def documents_of(meta: PackedMeta, left: int | None, right: int | None) -> Documents:
    """What of the documents takes part, for a window of these sides; derived once for all layers."""
    key = ("seeing", left, right, meta.lengths_q, meta.lengths_k)
    return derived(meta, key, lambda: _documents_of(meta, left, right))


def taken(tensor: torch.Tensor, places: torch.Tensor | None, count: int) -> torch.Tensor:
    """Those rows of [T,H,D]: a view where they are the first ones."""
    if places is not None:
        return tensor.index_select(0, places)
    return tensor if count == tensor.shape[0] else tensor.narrow(0, 0, count)


def put_back(
    result: torch.Tensor, lse: torch.Tensor | None, seeing: Documents, out: torch.Tensor | None, total: int
) -> Result:
    """Rows where they were among `total`, the others 0 and their LSE -inf."""
    if result.shape[0] == total:
        return written(out, result), lse
    if seeing.rows is None:
        left = total - result.shape[0]
        lse = None if lse is None else pad(lse, (0, left), value=float("-inf"))
        if out is None:
            return pad(result, (0, 0, 0, 0, 0, left)), lse
        out.narrow(0, 0, result.shape[0]).copy_(result)
        out.narrow(0, result.shape[0], left).zero_()
        return out, lse
    rows, lse = TORCH_ROWS.unpack(result, lse, seeing.rows, None if out is None else out.unsqueeze(0), 1, total)
    return rows.squeeze(0) if out is None else out, None if lse is None else lse.squeeze(0)


def _documents_of(meta: PackedMeta, left: int | None, right: int | None) -> Documents:
    """Leaving out rows before the first seeing one, and keys before the first seen, moves no bottom-right diagonal."""
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
