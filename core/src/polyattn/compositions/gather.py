"""gather: paged keys through a packed slot: only the rows that are read are copied out of the pages."""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import pad

from polyattn.backends import pools
from polyattn.backends.calls import Result, SlotCall, written
from polyattn.backends.derived import derived
from polyattn.backends.empty import empty_attention
from polyattn.compositions.facts import copied, inner
from polyattn.door.backend import Features
from polyattn.door.request import Request, StructureFacts
from polyattn.structures.host_data import boundaries
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.paged import PagedMeta


def lower(request: Request, features: Features) -> Request | str | None:
    """Packed documents, one a row of the block table; the pool bounds how many keys there are."""
    facts = request.structure_facts
    if request.structure_kind != "paged" or not features.kinds & {"packed", "dense"}:
        return None
    if not facts.host:
        return "gathering pages needs the block table and the lengths on the host (Paged of lists or CPU tensors)"
    if request.capturing:
        return "gathering pages would bake the block table into the captured graph"
    heads, width = request.q.shape[-2:]
    rows = request.q.shape[0] if len(request.q.shape) == 3 else request.q.shape[0] * request.q.shape[1]
    pool = request.k.shape[0] * request.k.shape[1]
    k, v = (copied(tensor, (pool, *tensor.shape[2:])) for tensor in (request.k, request.v))
    documents = StructureFacts(documents=facts.documents, spans=facts.spans, same_lengths=False)
    return inner(request, "packed", copied(request.q, (rows, heads, width)), k, v, documents)


def bind(inner: SlotCall, lowered: Request) -> SlotCall:
    """The slot on the gathered rows."""
    return partial(pages, inner)


def pages(
    inner: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    causal: bool,
    scale: float,
    window: tuple[int | None, int | None] | None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A paged slot over a packed one, for tables and lengths that the host knows.

    q [B,Sq,H,D], padded or not, or [T,H,D]; k, v are pools [pages,page_size,Hk,D].
    """
    layout = q.shape[:-2]
    lengths = meta.host_q if meta.host_q is not None else (layout[1],) * layout[0]
    packed = derived(meta, ("packed", lengths), lambda: _packed_meta(meta, lengths))
    index = derived(meta, ("rows", k.shape[1]), lambda: pools.rows_read(meta, k.shape[1]))
    padded = len(layout) == 2 and lengths != (layout[1],) * layout[0]
    if padded:
        tokens = torch.cat([q.select(0, row).narrow(0, 0, length) for row, length in enumerate(lengths)])
    else:
        tokens = q.flatten(0, 1) if len(layout) == 2 else q
    keys, values = _rows_of(k, index), _rows_of(v, index)
    if tokens.shape[0] == 0 or keys.shape[0] == 0:
        result, lse = empty_attention(tokens, keys, values, need_lse)
    else:
        result, lse = inner(
            tokens, keys, values, None, meta=packed, causal=causal, scale=scale, window=window, softcap=softcap,
            need_lse=need_lse, options=options,
        )  # fmt: skip
    if padded:
        result = _padded(result, 0, lengths, layout[1], 0.0)
        lse = None if lse is None else _padded(lse, 1, lengths, layout[1], float("-inf")).transpose(0, 1)
    elif len(layout) == 2:
        result = result.unflatten(0, layout)
        lse = None if lse is None else lse.unflatten(1, layout).transpose(0, 1)
    return written(out, result), lse


def _packed_meta(meta: PagedMeta, lengths: tuple[int, ...]) -> PackedMeta:
    assert meta.host_kv is not None
    device = meta.block_table.device
    cu_q, cu_k = boundaries(lengths).to(device), boundaries(meta.host_kv).to(device)
    longest = (max(lengths, default=0), max(meta.host_kv, default=0))
    return PackedMeta(cu_q, cu_k, *longest, lengths, meta.host_kv, meta.spans)


def _rows_of(pool: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Rows of [pages,page_size,H,D] by their slot; a pool whose pages lie apart is never copied whole."""
    page_size = pool.shape[1]
    if pool.stride(0) == page_size * pool.stride(1):
        return pool.flatten(0, 1).index_select(0, index)
    rows: torch.Tensor = torch.ops.aten.index.Tensor(pool, [index // page_size, index % page_size])
    return rows


def _padded(tokens: torch.Tensor, axis: int, lengths: tuple[int, ...], width: int, fill: float) -> torch.Tensor:
    """Rows side by side along `axis` -> stacked before it, each padded to `width`."""
    behind = (0, 0) * (tokens.dim() - 1 - axis)
    rows = [pad(row, (*behind, 0, width - row.shape[axis]), value=fill) for row in tokens.split(lengths, dim=axis)]
    return torch.stack(rows, dim=axis)
