"""MindIE-SD's attention_forward_varlen: packed documents and padding, by boundaries that the host knows."""

from __future__ import annotations

from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from polyattn.vendor import (
    TORCH_ROWS,
    KeyPaddingMeta,
    PackedMeta,
    Result,
    Window,
    derived,
    positive_scale,
    varlen_padding,
    written,
)
from polyattn_npu.mindie_forward import only_plain
from polyattn_npu.mindie_package import package

Lengths = tuple[int, ...]


class Documents(NamedTuple):
    """How documents reach the op, which gives no answer for a row without keys and, causal, none before the first key.

    ends_q, ends_k  cumulative, with a leading 0, as host integers; ends_q counts rows that see a key
    seeing          rows of each document that see a key: its last ones
    pieces          blind and seeing rows of each document in turn; empty where no row is blind
    rows, keys      of all documents
    """

    ends_q: list[int]
    ends_k: list[int]
    seeing: list[int]
    pieces: list[int]
    rows: int
    keys: int


def documents_of(lengths_q: Lengths, lengths_k: Lengths, causal: bool) -> Documents:
    """The plan for documents of these lengths. Bottom-right: of more queries than keys the first see nothing."""
    if causal:
        seeing = [min(rows, keys) for rows, keys in zip(lengths_q, lengths_k, strict=True)]
    else:
        seeing = [rows if keys else 0 for rows, keys in zip(lengths_q, lengths_k, strict=True)]
    blind = [rows - seen for rows, seen in zip(lengths_q, seeing, strict=True)]
    pieces = list(chain.from_iterable(zip(blind, seeing, strict=True))) if any(blind) else []
    ends_q, ends_k = (list(accumulate(lengths, initial=0)) for lengths in (seeing, lengths_k))
    return Documents(ends_q, ends_k, seeing, pieces, sum(lengths_q), sum(lengths_k))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Documents, causal: bool, scale: float
) -> torch.Tensor:
    """q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv] -> [T,H,Dv]. Rows that see nothing, and those past the documents, are 0."""
    if plan.ends_q[-1] == 0:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    left = q.shape[0] - plan.rows
    q, k, v = q.narrow(0, 0, plan.rows), k.narrow(0, 0, plan.keys), v.narrow(0, 0, plan.keys)
    if plan.pieces:
        q = torch.cat(q.split(plan.pieces)[1::2])
    result: torch.Tensor = package().attention_forward_varlen(
        q, k, v, plan.ends_q, plan.ends_k, softmax_scale=float(scale), causal=causal
    )
    if plan.pieces:
        blank = [result.new_zeros(rows, *result.shape[1:]) for rows in plan.pieces[::2]]
        result = torch.cat(list(chain.from_iterable(zip(blank, result.split(plan.seeing), strict=True))))
    return pad(result, (0, 0, 0, 0, 0, left)) if left else result


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
    options: tuple[Any, ...],
) -> Result:
    """Documents side by side, none seeing another; [real, pad] is one document. Needs no mask."""
    only_plain(False, window, softcap, need_lse)
    lengths_q, lengths_k = _agreeing(meta, q.shape[0], k.shape[0])
    key = ("mindie", lengths_q, lengths_k, causal)
    plan = derived(meta, key, lambda: documents_of(lengths_q, lengths_k, causal))
    result = attend(q, k, v, plan, causal, scale)
    return written(out, result), None


def _agreeing(meta: PackedMeta, rows: int, keys: int) -> tuple[Lengths, Lengths]:
    """The host's lengths, held against what is known of the boundaries on the device without reading them."""
    lengths_q, lengths_k = meta.lengths_q, meta.lengths_k
    if lengths_q is None or lengths_k is None:
        raise ValueError("cu_seqlens: attention_forward_varlen takes boundaries as host integers, and none are known")
    for name, lengths, cu, longest, total in (
        ("cu_q", lengths_q, meta.cu_q, meta.max_q, rows),
        ("cu_k", lengths_k, meta.cu_k, meta.max_k, keys),
    ):
        if len(lengths) != cu.shape[0] - 1 or max(lengths, default=0) > longest or sum(lengths) > total:
            raise ValueError(
                f"{name} (cu_seqlens): it bounds {cu.shape[0] - 1} documents of at most {longest} of {total} rows, "
                f"but the host's lengths are {len(lengths)} documents, the longest {max(lengths, default=0)}, "
                f"of {sum(lengths)} rows"
            )
    return lengths_q, lengths_k


def key_padding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    **call: Any,
) -> Result:
    """Kept keys side by side, one document a sample; padding that the host knows."""
    lengths_k = meta.lengths
    if lengths_k is None:
        raise ValueError("KeyPadding: attention_forward_varlen takes boundaries as host integers, and none are known")
    lengths_q = (q.shape[1],) * q.shape[0] if meta.queries == "all" else lengths_k
    causal = call["causal"]
    plan = derived(meta, ("mindie", lengths_q, causal), lambda: documents_of(lengths_q, lengths_k, causal))

    def kernel(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        *,
        causal: bool,
        scale: float,
        window: Window,
        softcap: float,
        need_lse: bool,
        **boundaries: Any,  # on the device: the op takes the host's
    ) -> Result:
        only_plain(False, window, softcap, need_lse)
        result = attend(q, k, v, plan, causal, scale)
        return written(out, result), None

    return varlen_padding.packed_padding(kernel, TORCH_ROWS, q, k, v, out, meta=meta, **call)
