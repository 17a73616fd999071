"""The slots of `fusion` over packed documents, by their ends as host integers; key padding as documents."""

from __future__ import annotations

from functools import partial

import torch

from polyattn.vendor import (
    PackedMeta,
    Result,
    Window,
    document_loop,
    empty_attention,
    packed_rows,
    positive_scale,
    written,
)
from polyattn_npu.bands import sides, sparse
from polyattn_npu.documents import documents_of, put_back, taken
from polyattn_npu.fusion_forward import dense
from polyattn_npu.fusion_operator import SIDES, attend_packed
from polyattn_npu.samples import no_softcap


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
    no_softcap(softcap)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    left, right = sides(causal, window)
    seeing = documents_of(meta, left, right)
    if not seeing.ends_q:
        result, lse = empty_attention(q, k, v, need_lse)
        return written(out, result), lse
    total = q.shape[0]
    q, k, v = (
        taken(q, seeing.rows, seeing.ends_q[-1]),
        taken(k, seeing.keys, seeing.ends_k[-1]),
        taken(v, seeing.keys, seeing.ends_k[-1]),
    )
    result, lse = attend_packed(
        q, k, v, ends_q=seeing.ends_q, ends_k=seeing.ends_k, scale=scale, need_lse=need_lse,
        **sparse(*seeing.longest, left, right, q.device, SIDES),
    )  # fmt: skip
    return put_back(result, lse, seeing, out, total)


packed_spans = partial(document_loop, dense)
key_padding = partial(packed_rows, packed)
