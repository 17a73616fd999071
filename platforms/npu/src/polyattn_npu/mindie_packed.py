"""MindIE-SD's attention_forward_varlen: packed documents and padding, by boundaries that the host knows."""

from __future__ import annotations

from functools import partial

import torch

from polyattn.vendor import PackedMeta, Result, Window, packed_rows
from polyattn_npu import documents
from polyattn_npu.documents import Documents
from polyattn_npu.mindie_forward import only_plain
from polyattn_npu.mindie_package import package


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
    """Documents side by side, none seeing another; [real, pad] is one document. Needs no mask."""
    only_plain(False, window, softcap, need_lse)
    _check_boundaries(meta, q.shape[0], k.shape[0])
    return documents.packed(
        _attend_documents, q, k, v, out, meta=meta, causal=causal, scale=scale, window=None, need_lse=False
    )  # fmt: skip


key_padding = partial(packed_rows, packed)


def _attend_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: Documents,
    left: int | None,
    right: int | None,
    *,
    scale: float,
    need_lse: bool,
) -> Result:
    """A `documents.PackedOp`; boundaries have a leading 0 here."""
    result: torch.Tensor = package().attention_forward_varlen(
        q, k, v, [0, *parts.ends_q], [0, *parts.ends_k], softmax_scale=float(scale), causal=right is not None
    )
    return result, None


def _check_boundaries(meta: PackedMeta, rows: int, keys: int) -> None:
    """The host's lengths, held against what is known of the boundaries on the device without reading them."""
    if meta.lengths_q is None or meta.lengths_k is None:
        raise ValueError("cu_seqlens: attention_forward_varlen takes boundaries as host integers, and none are known")
    for name, lengths, cu, longest, total in (
        ("cu_q", meta.lengths_q, meta.cu_q, meta.max_q, rows),
        ("cu_k", meta.lengths_k, meta.cu_k, meta.max_k, keys),
    ):
        if len(lengths) != cu.shape[0] - 1 or max(lengths, default=0) > longest or sum(lengths) > total:
            raise ValueError(
                f"{name} (cu_seqlens): it bounds {cu.shape[0] - 1} documents of at most {longest} of {total} rows, "
                f"but the host's lengths are {len(lengths)} documents, the longest {max(lengths, default=0)}, "
                f"of {sum(lengths)} rows"
            )
