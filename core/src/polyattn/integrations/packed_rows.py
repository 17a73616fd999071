"""Finds packed documents in what transformers hands over: boundaries, positions, block-diagonal masks.

Batch rows are taken as laid end to end, so that boundaries and lengths count over B*S rows. While tracing nothing can
be read: there, what would need a look at the data becomes a mask inside the graph, as exact and less fast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers.utils.import_utils import is_tracing

from polyattn.integrations.derived import derived
from polyattn.structures import Mask, Packed

Window = tuple[int, int] | None


def documents_of_boundaries(
    query: torch.Tensor, mask: torch.Tensor | None, causal: bool, window: Window, kwargs: Mapping[str, Any]
) -> Packed:
    """The documents of `cu_seq_lens_q` and `cu_seq_lens_k`; a mask beside them may only repeat what they say."""
    cu_q, cu_k = kwargs["cu_seq_lens_q"], kwargs.get("cu_seq_lens_k")
    for name, boundaries in (("cu_seq_lens_q", cu_q), ("cu_seq_lens_k", cu_k)):
        if boundaries is not None and not isinstance(boundaries, torch.Tensor):
            raise TypeError(f"{name}: a tensor [documents + 1] is needed, got {type(boundaries).__name__}")
    max_q, max_k = kwargs.get("max_length_q"), kwargs.get("max_length_k")
    if max_q is None and is_tracing(cu_q):
        raise ValueError("max_length_q: while tracing it is needed beside cu_seq_lens_q, which cannot be read")

    def build() -> Packed:
        known = max_q is not None  # boundaries that need not be read
        q = cu_q.detach() if known else cu_q.cpu()
        if cu_k is None or cu_k is cu_q or (not is_tracing(cu_q) and torch.equal(cu_q, cu_k)):
            packed = Packed.from_cu_seqlens(q, None, max_q)
        else:
            packed = Packed.from_cu_seqlens(q, cu_k.detach() if known else cu_k.cpu(), max_q, max_k)
        if mask is not None and not _agrees(mask, packed, query, causal, window):
            raise ValueError(
                f"attention_mask, cu_seq_lens_q: within documents the mask {list(mask.shape)} hides keys that the "
                "documents do not; give one of the two"
            )
        return packed

    tensors = tuple(tensor for tensor in (cu_q, cu_k, mask) if tensor is not None)
    return derived(("boundaries", causal, window, max_q, max_k), tensors, build)


def documents_of_positions(
    position_ids: Any, query: torch.Tensor, key: torch.Tensor, causal: bool
) -> Packed | Mask | None:
    """The documents of rows whose positions go back to an earlier one; None where no row's do."""
    rows, keys = query.shape[2], key.shape[2]
    if not _may_hold_documents(position_ids, query, causal):
        return None
    if is_tracing(position_ids):
        return Mask(_same(_back(position_ids).cumsum(dim=1))[:, None]) if rows == keys else None
    packed = _restarts(position_ids, query)
    if packed is not None and causal and rows != keys:
        raise ValueError(
            f"position_ids: they restart within {rows} new tokens, which makes several documents of them, "
            f"and nothing says whose the {keys - rows} cached keys are"
        )
    return packed if rows == keys else None


def documents_of_mask(
    mask: torch.Tensor, position_ids: Any, query: torch.Tensor, key: torch.Tensor, causal: bool, window: Window
) -> Packed | None:
    """The documents of a mask that either is made of them, or says no more than causality and the window do."""
    if not _is_pairs(mask, query, key) or not _may_hold_documents(position_ids, query, causal):
        return None
    packed = _restarts(position_ids, query)
    if packed is None:
        return None

    def build() -> Packed | None:
        blocks = _visible(packed, query, causal, window).to(mask.device)
        everything = _allowed(query.shape[2], causal, window, mask.device).expand_as(blocks)
        return packed if any(torch.equal(mask[:, 0].expand_as(rule), rule) for rule in (blocks, everything)) else None

    return derived(("mask of documents", causal, window), (mask, position_ids), build)


def mask_within_boundaries(mask: torch.Tensor, cu_q: torch.Tensor, query: torch.Tensor) -> Mask:
    """A whole mask, narrowed to the documents of `cu_q`: for a graph, in which the two cannot be compared."""
    if mask.dtype != torch.bool:
        raise ValueError(f"attention_mask, cu_seq_lens_q: beside boundaries a mask must be bool, got {mask.dtype}")
    return Mask(mask & _inside(cu_q, query)[:, None])


def mask_within_positions(
    mask: torch.Tensor, position_ids: Any, query: torch.Tensor, key: torch.Tensor, causal: bool, window: Window
) -> torch.Tensor:
    """What `documents_of_mask` and a whole mask say together, for a graph: narrowed if it says nothing of its own."""
    if not _is_pairs(mask, query, key) or not _may_hold_documents(position_ids, query, causal):
        return mask
    says_nothing = (mask == _allowed(query.shape[2], causal, window, mask.device)).all()
    return torch.where(says_nothing, mask & _same(_back(position_ids).cumsum(dim=1))[:, None], mask)


def _may_hold_documents(position_ids: Any, query: torch.Tensor, causal: bool) -> bool:
    """By shapes: several documents in one row, as transformers' varlen path has it; in several rows if causal."""
    batch, rows = query.shape[0], query.shape[2]
    if not isinstance(position_ids, torch.Tensor) or rows < 2 or not (causal or batch == 1):
        return False
    return tuple(position_ids.shape) in ((1, rows), (batch, rows))


def _restarts(position_ids: torch.Tensor, query: torch.Tensor) -> Packed | None:
    batch, rows = query.shape[0], query.shape[2]

    def build() -> Packed | None:
        back = _back(position_ids.cpu())
        if not bool(back.any()):
            return None
        back[:, 0] = True
        first = back.expand(batch, rows).flatten().nonzero().flatten()
        return Packed.from_lengths(first.diff(append=torch.tensor([batch * rows])))

    return derived(("positions", batch), (position_ids,), build)


def _back(position_ids: torch.Tensor) -> torch.Tensor:
    """bool, as position_ids: whether a position is not past the one before it."""
    return torch.nn.functional.pad(position_ids[:, 1:] <= position_ids[:, :-1], (1, 0))


def _is_pairs(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> bool:
    """Whether a mask says, for all heads alike, which of its own rows' keys a query sees."""
    batch, rows = query.shape[0], query.shape[2]
    shapes = ((batch, 1, rows, rows), (1, 1, rows, rows))
    return mask.dtype == torch.bool and rows == key.shape[2] and tuple(mask.shape) in shapes


def _agrees(mask: torch.Tensor, packed: Packed, query: torch.Tensor, causal: bool, window: Window) -> bool:
    """Whether, within documents, a mask hides exactly what causality and the window hide."""
    if not _is_pairs(mask, query, query) or packed.cu_q is not packed.cu_k:
        return False
    inside, visible = (_visible(packed, query, *rule).to(mask.device) for rule in ((False, None), (causal, window)))
    return torch.equal(mask[:, 0] & inside, visible)


def _visible(packed: Packed, query: torch.Tensor, causal: bool, window: Window) -> torch.Tensor:
    """bool [B,S,S]: which keys of its own row a query of packed documents sees."""
    inside = _inside(packed.cu_q, query)
    return inside & _allowed(query.shape[2], causal, window, inside.device)


def _allowed(rows: int, causal: bool, window: Window, device: torch.device) -> torch.Tensor:
    """bool [S,S]: what causality and a window leave."""
    place = torch.arange(rows, device=device)
    behind = place[:, None] - place
    allowed = behind >= 0 if causal else torch.ones_like(behind, dtype=torch.bool)
    return allowed if window is None else allowed & (behind <= window[0]) & (behind >= -window[1])


def _inside(cu_q: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """bool [B,S,S]: pairs of rows of one document; rows past the last boundary are in none."""
    batch, rows = query.shape[0], query.shape[2]
    place = torch.arange(batch * rows, device=cu_q.device, dtype=cu_q.dtype)
    document = torch.bucketize(place, cu_q[1:], right=True).reshape(batch, rows)
    return _same(document) & (document < cu_q.shape[0] - 1)[:, :, None]


def _same(document: torch.Tensor) -> torch.Tensor:
    """bool [B,S,S]: pairs of rows with the same number."""
    return document[:, :, None] == document[:, None]
