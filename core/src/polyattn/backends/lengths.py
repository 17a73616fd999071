"""Padding, documents and pages, whoever knows their lengths: piecewise where the host does, else under a mask's blocks.

In each slot here `call` is what passes through as it came: scale, softcap, need_lse, options.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from polyattn.backends.calls import Kernel, Result, SlotCall, written
from polyattn.backends.derived import derived
from polyattn.backends.masked import by_visibility
from polyattn.backends.poison import apart
from polyattn.backends.visibility import Visibility, Window, of_key_padding, of_packed, of_paged_rows, of_paged_tokens
from polyattn.compositions import rows
from polyattn.compositions.gather import pages
from polyattn.compositions.loop import document_loop
from polyattn.structures.key_padding import KeyPaddingMeta
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.paged import PagedMeta


def key_padding(
    dense: SlotCall,
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """Each row's kept keys alone; holes beside causal or a window, and lengths only the device knows, by a mask."""
    if rows.takes(meta, causal, window):
        return rows.padded_rows(dense, q, k, v, out, meta=meta, causal=causal, window=window, **call)
    size = (q.shape[1], k.shape[1])
    visibility = derived(meta, ("seen", *size, causal, window), lambda: of_key_padding(meta, *size, causal, window))
    return by_visibility(attend, q, k, v, out, visibility=visibility, **call)


def packed(
    dense: SlotCall,
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """A call a document, or the mask that boundaries on the device describe."""
    if meta.lengths_q is not None:
        return document_loop(dense, q, k, v, out, meta=meta, causal=causal, window=window, **call)
    visibility = of_packed(meta, q.shape[0], k.shape[0], causal, window)
    return _as_one_sample(attend, q, k, v, out, visibility=visibility, **call)


def paged(
    dense: SlotCall,
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """Gathered rows as documents, or every page of the table under a mask that hides what is not kept."""
    if host_knows(meta):
        return pages(partial(document_loop, dense), q, k, v, out, meta=meta, causal=causal, window=window, **call)
    pool = (k.shape[1], k.shape[0])
    table = meta.block_table.to(torch.int64).clamp(0, k.shape[0] - 1).flatten()
    size = (meta.block_table.shape[0], -1)
    keys, values = (pages.index_select(0, table).flatten(0, 1).unflatten(0, size) for pages in (k, v))
    if q.dim() == 4:
        visibility = of_paged_rows(meta, q.shape[1], *pool, causal, window)
        return by_visibility(attend, q, keys, values, out, visibility=visibility, **call)
    visibility = of_paged_tokens(meta, q.shape[0], *pool, causal, window)
    return _as_one_sample(attend, q, keys.flatten(0, 1), values.flatten(0, 1), out, visibility=visibility, **call)


def host_knows(meta: PagedMeta) -> bool:
    """Whether the table and all lengths are known on the host."""
    queries = meta.q_lengths is None or meta.host_q is not None
    return queries and meta.host_table is not None and meta.host_kv is not None


def _as_one_sample(
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    visibility: Visibility,
    **call: Any,
) -> Result:
    """`by_visibility` of packed tensors [T,H,D], whose documents share products."""
    seen = visibility
    rows = apart(q, k, v, seen.seen_keys.logical_not(), seen.blind_rows, seen.first, seen.last)
    q, k, v = rows.q.unsqueeze(0), rows.k.unsqueeze(0), rows.v.unsqueeze(0)
    result, lse = by_visibility(attend, q, k, v, None, visibility=visibility, **call)
    result, lse = rows.felt(result.squeeze(0), None if lse is None else lse.squeeze(0))
    return written(out, result), lse
