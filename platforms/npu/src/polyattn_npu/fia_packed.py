"""The slots of `fia` over packed documents: its packed call under a mask where CANN has it, else a padded batch."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch

from polyattn.vendor import (
    PackedMeta,
    Result,
    Window,
    derived,
    document_loop,
    empty_attention,
    positive_scale,
    varlen,
    written,
)
from polyattn_npu import cann
from polyattn_npu.bands import sides, sparse
from polyattn_npu.documents import Documents, documents_of, put_back, taken
from polyattn_npu.fia_forward import dense
from polyattn_npu.fia_operator import SIDES, attend, attend_packed
from polyattn_npu.fia_rows import gathered, places, spread
from polyattn_npu.samples import no_softcap


class Spread(NamedTuple):
    """Documents as a padded batch: their lengths, and the places of their rows and keys in it."""

    lengths_q: tuple[int, ...]
    lengths_k: tuple[int, ...]
    places_q: torch.Tensor
    places_k: torch.Tensor


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
    """Documents of lengths that the host knows; a single one runs on views."""
    no_softcap(softcap)
    if meta.fixed and meta.lengths_q is not None and len(meta.lengths_q) == 1:
        return varlen.one_document(
            dense, q, k, v, out, meta=meta, causal=causal, scale=scale, window=window, softcap=softcap,
            need_lse=need_lse, options=options,
        )  # fmt: skip
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
    asked = sparse(*seeing.longest, left, right, q.device, SIDES)
    packs = cann.packed_fia(cann.installed())
    if asked and packs.takes(str(q.dtype).removeprefix("torch."), q.shape[-1], len(seeing.ends_q)):
        result, lse = attend_packed(
            q, k, v, ends_q=seeing.ends_q, ends_k=seeing.ends_k, scale=scale, need_lse=need_lse, **asked
        )
    else:
        layout = derived(meta, ("spread", left, right, seeing.ends_q, seeing.ends_k), lambda: _spread(seeing, q.device))
        result, lse = _padded(q, k, v, seeing.longest, layout, scale=scale, need_lse=need_lse, **asked)
    return put_back(result, lse, seeing, out, total)


packed_spans = partial(document_loop, dense)


def _padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, longest: tuple[int, int], layout: Spread, **asked: Any
) -> Result:
    """One sample a document, each by its lengths."""
    batch = len(layout.lengths_q)
    result, lse = attend(
        spread(q, layout.places_q, batch, longest[0]), spread(k, layout.places_k, batch, longest[1]),
        spread(v, layout.places_k, batch, longest[1]), actual_seq_lengths=list(layout.lengths_q),
        actual_seq_lengths_kv=list(layout.lengths_k), **asked,
    )  # fmt: skip
    return gathered(result, lse, layout.places_q)


def _spread(seeing: Documents, device: torch.device) -> Spread:
    lengths_q, lengths_k = _lengths(seeing.ends_q), _lengths(seeing.ends_k)
    return Spread(
        lengths_q, lengths_k, places(lengths_q, seeing.longest[0], device), places(lengths_k, seeing.longest[1], device)
    )


def _lengths(ends: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(end - start for start, end in zip((0, *ends), ends, strict=False))
