"""The slots of `fia` over samples [B,S,H,D]: dense, padding in place, masks and spans."""

from __future__ import annotations

from functools import partial

import torch

from polyattn.vendor import KeyPaddingMeta, Result, Window, derived, positive_scale, prefix_into, spans_into
from polyattn_npu import samples
from polyattn_npu.bands import sides, sparse
from polyattn_npu.fia_operator import SIDES, attend
from polyattn_npu.fia_rows import blanked, unseeing_rows

dense = partial(samples.dense, attend, SIDES)
prefix_kv = partial(prefix_into, dense)
spans = partial(spans_into, dense)
mask = partial(samples.mask, attend)


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
    samples.no_softcap(softcap)
    assert meta.lengths is not None
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    queries, lengths = q.shape[1], meta.lengths
    rows = lengths if meta.queries != "all" else tuple(queries if kept else 0 for kept in lengths)
    left, right = sides(causal, window)
    result, lse = attend(
        q, k, v, scale=scale, need_lse=need_lse, actual_seq_lengths=list(rows), actual_seq_lengths_kv=list(lengths),
        **sparse(queries, k.shape[1], left, right, q.device, SIDES),
    )  # fmt: skip
    unseeing = derived(meta, ("unseeing", queries), lambda: unseeing_rows([(0, n) for n in rows], queries, q.device))
    return blanked(result, lse, unseeing, out)
