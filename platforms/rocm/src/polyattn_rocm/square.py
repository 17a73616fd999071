"""Causal through kernels that are right only where a document has queries, and a key for each of them.

Two kinds of these kernels write zeros over the LSE of other documents, or behind the tensor's end, where a whole tile
of queries sees nothing; some align causal at the top left. Neither shows where all documents are square and none is
empty.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from polyattn.vendor import PackedMeta, Request, RowOps, derived, flash2, on_square, send, varlen


def dense(
    kernel: varlen.VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    causal: bool,
    need_lse: bool,
    **call: Any,
) -> flash2.Result:
    """A slot for "dense" over a kernel that aligns causal top-left."""
    if not causal:
        return varlen.batched(kernel, q, k, v, out, causal=False, need_lse=need_lse, **call)
    square = partial(varlen.batched, kernel, out=None, causal=True, need_lse=need_lse, **call)
    result, lse = on_square(square, q, k, v, need_lse)
    return (result if out is None else out.copy_(result)), lse


def dense_seeing(
    kernel: varlen.VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    causal: bool,
    **call: Any,
) -> flash2.Result:
    """A slot for "dense" over a kernel that aligns causal as we do, and gets only queries that see a key."""
    sees = varlen.batched if not causal or q.shape[1] <= k.shape[1] else dense
    return sees(kernel, q, k, v, out, causal=causal, **call)


def packed(
    kernel: varlen.VarlenKernel,
    rows: RowOps,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    causal: bool,
    **call: Any,
) -> flash2.Result:
    """A slot for "packed" whose kernel gets no empty document under causal."""
    known = derived(meta, "filled", lambda: _filled(meta)) if causal else meta
    return varlen.packed(kernel, rows, q, k, v, out, meta=known, causal=causal, **call)


def _filled(meta: PackedMeta) -> PackedMeta:
    """`meta` without its empty documents. Queries and keys share their boundaries, which the host knows."""
    assert meta.lengths_q is not None  # `objections` lets no others through
    lengths = tuple(length for length in meta.lengths_q if length)
    if len(lengths) == len(meta.lengths_q):
        return meta
    ends = torch.tensor((0, *lengths), dtype=torch.int32).cumsum(0, dtype=torch.int32)
    cu = send(ends, meta.cu_q.device)
    return replace(meta, cu_q=cu, cu_k=cu, lengths_q=lengths, lengths_k=lengths)


def objections(request: Request, why: str) -> tuple[str, ...]:
    """Against causal over documents that may be other than square, or empty; `why` the kernel cannot."""
    facts = request.structure_facts
    if not request.causal or request.structure_kind not in ("packed", "key_padding"):
        return ()
    fixed = facts.host and not facts.capacity
    if request.structure_kind == "packed" and fixed and facts.same_lengths:
        return ()
    way = "Packed.from_lengths with one list for queries and keys is served; rocm:triton takes any"
    return (f"causal over documents of unknown or different lengths: {why} ({way})",)
