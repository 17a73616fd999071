"""The slots of `fia` over packed documents: its packed call under a mask where CANN has it, else a padded batch."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from polyattn.vendor import PackedMeta, Result, derived, document_loop, varlen
from polyattn_npu import cann, documents
from polyattn_npu.bands import sparse_mode_args
from polyattn_npu.batched import no_softcap
from polyattn_npu.documents import Documents
from polyattn_npu.fia_forward import dense
from polyattn_npu.fia_operator import WINDOW_ARGS, attend, attend_packed
from polyattn_npu.padded_rows import pad_rows, places, unpad_rows


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    softcap: float,
    options: tuple[object, ...],
    **call: Any,
) -> Result:
    """Documents of lengths that the host knows; a single one runs on views."""
    no_softcap(softcap)
    if meta.fixed and meta.lengths_q is not None and len(meta.lengths_q) == 1:
        return varlen.one_document(dense, q, k, v, out, meta=meta, softcap=softcap, options=options, **call)
    return documents.packed(_attend, q, k, v, out, meta=meta, **call)


packed_spans = partial(document_loop, dense)


class PaddedPlaces(NamedTuple):
    """Where packed rows and keys are in a padded batch."""

    q: torch.Tensor
    k: torch.Tensor


def _attend(
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
    """A `documents.PackedOp`: packed where this process's CANN takes that, else one sample a document."""
    op_args: dict[str, Any] = {"scale": scale, "need_lse": need_lse}
    rule = sparse_mode_args(*parts.longest, left, right, q.device, WINDOW_ARGS)
    known = cann.packed_fia(cann.installed())
    if rule and known.takes(str(q.dtype).removeprefix("torch."), q.shape[-1], len(parts.ends_q)):
        return attend_packed(q, k, v, ends_q=parts.ends_q, ends_k=parts.ends_k, **op_args, **rule)
    where = derived(parts, "padded", lambda: _places(parts, q.device))
    batch, (queries, keys) = len(parts.ends_q), parts.longest
    result, lse = attend(
        pad_rows(q, where.q, batch, queries), pad_rows(k, where.k, batch, keys), pad_rows(v, where.k, batch, keys),
        actual_seq_lengths=list(parts.lengths_q), actual_seq_lengths_kv=list(parts.lengths_k), **op_args, **rule,
    )  # fmt: skip
    return unpad_rows(result, lse, where.q)


def _places(parts: Documents, device: torch.device) -> PaddedPlaces:
    queries, keys = parts.longest
    return PaddedPlaces(places(parts.lengths_q, queries, device), places(parts.lengths_k, keys, device))
