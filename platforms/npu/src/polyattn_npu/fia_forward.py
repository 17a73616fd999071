"""The slots of `fia` over samples [B,S,H,D]: dense, padding in place, masks and spans."""

from __future__ import annotations

from functools import partial

import torch

from polyattn.vendor import KeyPaddingMeta, Result, Window, derived, positive_scale, prefix_into, spans_into, written
from polyattn_npu import batched
from polyattn_npu.bands import sparse_mode_args, window_sides
from polyattn_npu.fia_operator import WINDOW_ARGS, attend
from polyattn_npu.padded_rows import blank, rows_with_a_key

dense = partial(batched.dense, attend, WINDOW_ARGS)
prefix_kv = partial(prefix_into, dense)
spans = partial(spans_into, dense)
mask = partial(batched.mask, attend)


def key_padding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Prefixes of the keys where they are, by their lengths on the host; causal, windows of the same queries only."""
    batched.no_softcap(softcap)
    assert meta.lengths is not None
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    queries, lengths = q.shape[1], meta.lengths
    rows = lengths if meta.queries != "all" else tuple(queries if kept else 0 for kept in lengths)
    left, right = window_sides(causal, window)
    result, lse = attend(
        q, k, v, scale=scale, need_lse=need_lse, actual_seq_lengths=list(rows), actual_seq_lengths_kv=list(lengths),
        **sparse_mode_args(queries, k.shape[1], left, right, q.device, WINDOW_ARGS),
    )  # fmt: skip
    kept = derived(meta, ("with a key", queries), lambda: rows_with_a_key([(0, n) for n in rows], queries, q.device))
    blank(result, lse, kept)
    return written(out, result), lse
