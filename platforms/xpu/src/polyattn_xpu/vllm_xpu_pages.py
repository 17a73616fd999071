"""Pages by vllm-xpu-kernels: where they are, or, where strange values may lie behind a row's last key, copied out."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from polyattn.vendor import PagedMeta, derived, empty_attention, pools, sight, varlen
from polyattn_xpu.options import vouched
from polyattn_xpu.vllm_xpu_build import step
from polyattn_xpu.vllm_xpu_forward import Result, Window, attend, blanked, takes


def paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PagedMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Queries [B,Sq,H,D] or packed [T,H,D] over pages; the host knows the table and the lengths."""
    takes(window, softcap)
    assert meta.host_kv is not None
    layout = q.shape[:-2]
    batched = len(layout) == 2
    asked = (layout[1],) * layout[0] if batched else meta.host_q or ()
    tokens, place = (q.flatten(0, 1), None if out is None else varlen.flat_rows(out)) if batched else (q, out)
    if tokens.shape[0] == 0 or sum(meta.host_kv) == 0:
        result, _ = empty_attention(q, k, v, False)
        return (result if out is None else out.copy_(result)), None
    cu_q = varlen.even_boundaries(layout[0], layout[1], q.device) if batched else meta.cu_q
    cu_k = derived(meta, "cu_k", lambda: pad(meta.kv_lengths.cumsum(0, dtype=torch.int32), (1, 0)))
    whole = vouched(options) or all(kept % step(k.shape[1]) == 0 for kept in meta.host_kv)
    if whole and all(asked):  # the kernel for rows of one query writes a row even where there is none
        table = derived(meta, ("table", k.shape[0]), lambda: pools.table_within(meta, k.shape[0]))
        result, _ = attend(
            tokens, k, v, place, cu_q, max(asked), max(meta.host_kv), causal, scale, False,
            {"seqused_k": meta.kv_lengths, "block_table": table},
        )  # fmt: skip
        if not sight.every_row_sees(asked, meta.host_kv, causal, None):
            sight.blank_blind(result, None, cu_q, cu_k, sum(meta.host_kv), causal, None)
    else:
        rows = derived(meta, ("rows", k.shape[1]), lambda: pools.rows_read(meta, k.shape[1]))
        keys, values = (pool.flatten(0, 1).index_select(0, rows) for pool in (k, v))
        result, _ = blanked(
            tokens, keys, values, place, cu_q=cu_q, cu_k=cu_k, max_q=max(asked), max_k=max(meta.host_kv),
            causal=causal, scale=scale, window=None, softcap=0.0, need_lse=False,
        )  # fmt: skip
    result = result.unflatten(0, layout)
    if out is None:
        return result, None
    return out if place is not None else out.copy_(result), None
