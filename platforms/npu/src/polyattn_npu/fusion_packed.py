"""The slots of `fusion` over packed documents, by their ends as host integers; key padding as documents."""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch

from polyattn.vendor import TORCH_ROWS, PackedMeta, derived, document_loop, empty_attention, packed_rows, positive_scale
from polyattn_npu.bands import Band, Window, band_of, sides, sparse
from polyattn_npu.fusion_forward import dense
from polyattn_npu.fusion_operator import SIDES, Result, attend_packed


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


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Documents of lengths that the host knows, in one call; rows that see nothing never reach the op."""
    if softcap:
        raise ValueError(f"npu_fusion_attention takes no softcap, asked {softcap}")
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    left, right = sides(causal, window)
    key = ("seeing", left, right, meta.lengths_q, meta.lengths_k)
    seeing = derived(meta, key, lambda: documents_of(meta, left, right))
    if not seeing.ends_q:
        result, lse = empty_attention(q, k, v, need_lse)
        return (result if out is None else out.copy_(result)), lse
    total = q.shape[0]
    q, k, v = (
        _taken(q, seeing.rows, seeing.ends_q[-1]),
        _taken(k, seeing.keys, seeing.ends_k[-1]),
        _taken(v, seeing.keys, seeing.ends_k[-1]),
    )
    result, lse = attend_packed(
        q, k, v, ends_q=seeing.ends_q, ends_k=seeing.ends_k, scale=scale, need_lse=need_lse,
        **sparse(*seeing.longest, left, right, q.device, SIDES),
    )  # fmt: skip
    return _put_back(result, lse, seeing, out, total)


packed_spans = partial(document_loop, dense)
key_padding = partial(packed_rows, packed)


def documents_of(meta: PackedMeta, left: int | None, right: int | None) -> Documents:
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


def _taken(tensor: torch.Tensor, places: torch.Tensor | None, count: int) -> torch.Tensor:
    """Those rows of [T,H,D]: a view where they are the first ones."""
    if places is not None:
        return tensor.index_select(0, places)
    return tensor if count == tensor.shape[0] else tensor.narrow(0, 0, count)


def _put_back(
    result: torch.Tensor, lse: torch.Tensor | None, seeing: Documents, out: torch.Tensor | None, total: int
) -> Result:
    """Rows where they were among `total`, the others 0 and their LSE -inf."""
    if result.shape[0] == total:
        return (result if out is None else out.copy_(result)), lse
    places = seeing.rows
    if places is None:
        places = torch.arange(result.shape[0], device=result.device)
    rows, lse = TORCH_ROWS.unpack(result, lse, places, None if out is None else out.unsqueeze(0), 1, total)
    return rows.squeeze(0) if out is None else out, None if lse is None else lse.squeeze(0)
