"""The slots of `fia` over packed documents: its packed call under a mask where CANN has it, else a padded batch."""

from __future__ import annotations

from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch

from polyattn.vendor import PackedMeta, Result, derived, document_loop, varlen, warn
from polyattn_npu import cann, documents
from polyattn_npu.bands import sparse_mode_args
from polyattn_npu.batched import no_softcap
from polyattn_npu.cann_limits import packed_fia
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
    return documents.packed(_attend_documents, q, k, v, out, meta=meta, **call)


#: How many times the documents' rows a padded batch of them may have.
_MOST_PADDED = 4

packed_spans = partial(document_loop, dense)


class PaddedPlaces(NamedTuple):
    """Where packed rows and keys are in a padded batch."""

    q: torch.Tensor
    k: torch.Tensor


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
    """A `documents.PackedOp`: packed where this process's CANN takes that, else one sample a document."""
    op_args: dict[str, Any] = {"scale": scale, "need_lse": need_lse}
    rule = sparse_mode_args(*parts.longest, left, right, q.device, WINDOW_ARGS)
    known = packed_fia(cann.installed())
    if rule and known.takes(str(q.dtype).removeprefix("torch."), q.shape[-1], len(parts.ends_q)):
        return attend_packed(q, k, v, ends_q=parts.ends_q, ends_k=parts.ends_k, **op_args, **rule)
    if _is_mostly_padding(parts):
        return _one_by_one(q, k, v, parts, left, right, **op_args)
    where = derived(parts, "padded", lambda: _places(parts, q.device))
    batch, (queries, keys) = len(parts.ends_q), parts.longest
    result, lse = attend(
        pad_rows(q, where.q, batch, queries), pad_rows(k, where.k, batch, keys), pad_rows(v, where.k, batch, keys),
        actual_seq_lengths=list(parts.lengths_q), actual_seq_lengths_kv=list(parts.lengths_k), **op_args, **rule,
    )  # fmt: skip
    return unpad_rows(result, lse, where.q)


def _is_mostly_padding(parts: Documents) -> bool:
    """Whether a batch padded to the longest document has many times the rows of the documents."""
    batch, (queries, keys) = len(parts.ends_q), parts.longest
    return batch * queries > _MOST_PADDED * parts.ends_q[-1] or batch * keys > _MOST_PADDED * parts.ends_k[-1]


def _one_by_one(
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
    """A call a document."""
    _tell_once()
    pieces: list[Result] = []
    for end_q, end_k, rows, keys in zip(parts.ends_q, parts.ends_k, parts.lengths_q, parts.lengths_k, strict=True):
        own_q, own_k, own_v = (
            tensor.narrow(0, end - length, length).unsqueeze(0)
            for tensor, end, length in ((q, end_q, rows), (k, end_k, keys), (v, end_k, keys))
        )
        rule = sparse_mode_args(rows, keys, left, right, q.device, WINDOW_ARGS)
        pieces.append(attend(own_q, own_k, own_v, scale=scale, need_lse=need_lse, **rule))
    out = torch.cat([piece.squeeze(0) for piece, _ in pieces])
    return out, torch.cat([lse.squeeze(0) for _, lse in pieces if lse is not None], dim=1) if need_lse else None


@lru_cache(maxsize=1)
def _tell_once() -> None:
    warn(
        "npu:fia runs packed documents of very unequal lengths a call each: padded to the longest they would be more "
        f"than {_MOST_PADDED} times as many rows, and this CANN does not take them packed; npu:fusion packs them"
    )


def _places(parts: Documents, device: torch.device) -> PaddedPlaces:
    queries, keys = parts.longest
    return PaddedPlaces(places(parts.lengths_q, queries, device), places(parts.lengths_k, keys, device))
