"""Pages by mate: where they are, or, where strange values may lie behind a row's last key, copied out."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from polyattn.vendor import PagedMeta, derived, empty_attention, flash2, pools, sight, varlen
from polyattn_musa.apart import TILE
from polyattn_musa.mate_forward import Result, Window, called, kernel_for
from polyattn_musa.mate_package import operators
from polyattn_musa.options import vouched


def paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    options: tuple[object, ...],
    **call: Any,
) -> Result:
    """Queries [B,Sq,H,D] or packed [T,H,D] over pages; the host knows the table and the lengths."""
    assert meta.host_kv is not None
    if 0 in q.shape or sum(meta.host_kv) == 0:
        result, lse = empty_attention(q, k, v, call["need_lse"])
        return (result if out is None else out.copy_(result)), lse
    if vouched(options) or all(kept % TILE == 0 for kept in meta.host_kv):
        table = derived(meta, ("table", k.shape[0]), lambda: pools.table_within(meta, k.shape[0]))
        return flash2.paged(partial(in_place, table), q, k, v, out, meta=meta, options=options, **call)
    rows = derived(meta, ("rows", k.shape[1]), lambda: pools.rows_read(meta, k.shape[1]))
    keys, values = (pool.flatten(0, 1).index_select(0, rows) for pool in (k, v))
    return flash2.paged(
        partial(copied, kernel_for(meta.host_kv, False)), q, keys, values, out, meta=meta, options=options, **call
    )


def in_place(
    whole: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    table: torch.Tensor,
    used: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
) -> Result:
    """The paged kernel of `polyattn.vendor.flash2`, by a table `whole` whose entries all are in the pool."""
    _, attend = operators()
    lengths = {
        "cu_seqlens_q": cu_q, "max_seqlen_q": max_q, "max_seqlen_k": max_k, "seqused_k": used, "page_table": whole,
    }  # fmt: skip
    result, lse = called(attend, q, k, v, causal, scale, window, softcap, need_lse, lengths)
    sight.blank_blind(result, lse, cu_q, cu_k, k.shape[0] * k.shape[1] * whole.shape[0], causal, window)
    return result, lse


def copied(
    kernel: varlen.VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    table: torch.Tensor,
    used: torch.Tensor,
    **call: Any,
) -> Result:
    """As `in_place`, over kept rows packed side by side, by a varlen kernel."""
    return kernel(q, k, v, None, **call)
