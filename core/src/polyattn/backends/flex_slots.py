"""Slots over torch's flex attention, compiled: padding, masks, documents and spans in one kernel over blocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch

from polyattn.backends import visibility
from polyattn.backends.calls import Result, wants_grad
from polyattn.backends.derived import derived
from polyattn.backends.flex_blocks import Blocks, of_mask, of_visibility
from polyattn.backends.flex_programs import run
from polyattn.backends.poison import apart
from polyattn.backends.visibility import Visibility, Window
from polyattn.compositions.slice import prefix
from polyattn.structures.key_padding import KeyPaddingMeta
from polyattn.structures.mask import MaskMeta
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.spans import SpansMeta
from polyattn.structures.transfer import is_capturing

_T = TypeVar("_T")

#: Blocks of dense calls, which have no structure to keep them on.
_POSITIONS = SimpleNamespace()


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """Every query over every key, or those that causal and a window leave."""
    if not causal and window is None:
        return _attend(q, k, v, out, None, None, None, **call)
    size = (*q.shape[:2], k.shape[1])
    positions = partial(visibility.of_positions, size[1], size[2], causal, window, q.device)
    blocks, hidden, *_ = _kept(_POSITIONS, (*size, causal, window, q.device), positions, size, q.device)
    return _attend(q, k, v, out, blocks, None if window is None else hidden, None, **call)


def key_padding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """Kept keys, holes too, where they are; whoever knows the lengths."""
    size = (*q.shape[:2], k.shape[1])
    padding = partial(visibility.of_key_padding, meta, size[1], size[2], causal, window)
    return _attend(q, k, v, out, *_kept(meta, ("flex", *size, causal, window), padding, size, q.device)[:3], **call)


def mask(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: MaskMeta,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """A boolean mask, read where it is: broadcast axes stay broadcast."""
    keep = meta.keep
    assert keep is not None  # additive masks are not among this slot's kinds
    shape = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])

    def build() -> tuple[Blocks, torch.Tensor | None]:
        visible = meta.visible_keys
        if not causal and window is None:
            return of_mask(keep, None, shape), None if visible is None else visible.logical_not()
        seen = visibility.of_positions(shape[2], shape[3], causal, window, q.device)
        near = seen.seen_keys if visible is None else seen.seen_keys & visible
        return of_mask(keep, seen, shape), near.logical_not()

    blocks, hidden = derived(meta, ("flex", shape, causal, window), _outside_graphs(build, q.device))
    return _attend(q, k, v, out, blocks, hidden, None, **call)


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    causal: bool,
    window: Window,
    **call: Any,
) -> Result:
    """Documents side by side, spans too; whoever knows the lengths. A block of scores may hold rows of several."""
    size = (1, q.shape[0], k.shape[0])
    documents = partial(visibility.of_packed, meta, size[1], size[2], causal or meta.spans is not None, window)
    if meta.lengths_q is not None and meta.fixed:
        seen = _kept(meta, ("flex", *size, causal, window), documents, size, q.device)
    else:  # boundaries may be rewritten in place between two calls
        seen = _seen(documents, size)
    blocks, hidden, blind, first, last = seen
    rows = apart(q, k, v, hidden, blind, first, last)
    q, k, v = rows.q.unsqueeze(0), rows.k.unsqueeze(0), rows.v.unsqueeze(0)
    result, lse = _attend(q, k, v, None, blocks, None, blind, **call)
    result, lse = rows.felt(result.squeeze(0), None if lse is None else lse.squeeze(0))
    return result if out is None else out.copy_(result), lse


def spans(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: SpansMeta,
    causal: bool,
    window: None,
    **call: Any,
) -> Result:
    """Causal but for the full spans; samples may differ."""
    size = (*q.shape[:2], k.shape[1])
    ends = partial(visibility.of_spans, meta, size[1], size[2])
    return _attend(q, k, v, out, *_kept(meta, ("flex", *size), ends, size, q.device)[:3], **call)


prefix_kv = partial(prefix, dense)


class _Seen(NamedTuple):
    """Blocks; keys [B|1,Sk] that no query sees; query rows [B|1,Sq] that see nothing; the keys [first,last) of each."""

    blocks: Blocks
    hidden: torch.Tensor
    blind: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


def _kept(
    holder: Any, key: Any, made: Callable[[], Visibility], size: tuple[int, int, int], device: torch.device
) -> _Seen:
    """What a visibility comes to, once for all layers."""
    return derived(holder, key, _outside_graphs(partial(_seen, made, size), device))


def _seen(made: Callable[[], Visibility], size: tuple[int, int, int]) -> _Seen:
    seen = made()
    blocks = of_visibility(seen, size[0], size[1])
    return _Seen(blocks, seen.seen_keys.logical_not(), seen.blind_rows, seen.first, seen.last)


def _outside_graphs(build: Callable[[], _T], device: torch.device) -> Callable[[], _T]:
    """`build`, which refuses to run while a graph is captured: what it makes must outlive that graph."""

    def outside() -> _T:
        if is_capturing(device):
            raise RuntimeError(
                "flex: its block mask is made at a first call, which cannot lie inside a graph capture: make this call "
                "once before (pa.warmup)"
            )
        return build()

    return outside


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    blocks: Blocks | None,
    hidden: torch.Tensor | None,
    blind: torch.Tensor | None,
    *,
    scale: float,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """[B,S,H,D]; hidden keys [B|1,Sk] and, where gradients pass through them, blind rows [B|1,Sq] become 0."""
    if hidden is not None:
        k, v = _without(k, hidden), _without(v, hidden)
    if blind is not None and wants_grad(q, k, v):
        q = _without(q, blind)
    result, lse = run(q, k, v, blocks, scale=scale, softcap=softcap, grad=wants_grad(q, k, v))
    return result if out is None else out.copy_(result), lse if need_lse else None


def _without(rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    return rows.masked_fill(hidden.unsqueeze(-1).unsqueeze(-1), 0.0)
