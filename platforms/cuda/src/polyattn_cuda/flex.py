"""torch's flex attention, compiled: causal, windows, padding, masks, documents and spans in one kernel over blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from polyattn.vendor import (
    Backend,
    Features,
    KeyPaddingMeta,
    Machine,
    MaskMeta,
    PackedMeta,
    Request,
    Requires,
    Slot,
    SpansMeta,
    Visibility,
    derived,
    prefix,
    visibility,
    wants_grad,
)
from polyattn_cuda.flex_blocks import Blocks, of_mask, of_visibility
from polyattn_cuda.flex_programs import run

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None

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
    blocks, hidden, *_ = _kept(_POSITIONS, (*size, causal, window, q.device), positions, size)
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
    return _attend(q, k, v, out, *_kept(meta, ("flex", *size, causal, window), padding, size)[:3], **call)


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

    blocks, hidden = derived(meta, ("flex", shape, causal, window), _outside_graphs(build))
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
    """Documents side by side, spans too; whoever knows the lengths.

    A block of scores may hold rows of several documents, where a weight of 0 does not stop a NaN: keys and values that
    are not finite are taken out, and the query rows that see one are NaN instead; so are query rows, where gradients
    pass through them.
    """
    size = (1, q.shape[0], k.shape[0])
    documents = partial(visibility.of_packed, meta, size[1], size[2], causal or meta.spans is not None, window)
    if meta.lengths_q is not None and meta.fixed:
        seen = _kept(meta, ("flex", *size, causal, window), documents, size)
    else:  # boundaries may be rewritten in place between two calls
        seen = _seen(documents, size)
    blocks, hidden, blind, first, last = seen
    spoilt = (k.isfinite().all(-1) & v.isfinite().all(-1)).logical_not()  # [Tk,Hk]
    wrong = spoilt & hidden.T.logical_not()
    k, v = (rows.masked_fill((spoilt | hidden.T).unsqueeze(-1), 0.0) for rows in (k, v))
    strange = None
    if wants_grad(q, k, v):
        strange = q.isfinite().all(-1).logical_not()  # [T,H]
        q = q.masked_fill(strange.unsqueeze(-1), 0.0)
    result, lse = _attend(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None, blocks, None, blind, **call)
    before = pad(wrong.cumsum(0), (0, 0, 1, 0))  # [Tk+1,Hk]
    upto, since = before.index_select(0, last.flatten()), before.index_select(0, first.flatten())
    feels = (upto > since).repeat_interleave(q.shape[1] // k.shape[1], dim=1)  # [T,H]
    if strange is not None:
        feels = feels | strange & blind.T.logical_not()
    result = result.squeeze(0).masked_fill(feels.unsqueeze(-1), float("nan"))
    lse = None if lse is None else lse.squeeze(0).masked_fill(feels.T, float("nan"))
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
    return _attend(q, k, v, out, *_kept(meta, ("flex", *size), ends, size)[:3], **call)


prefix_kv = partial(prefix, dense)


class _Seen(NamedTuple):
    """Blocks; keys [B|1,Sk] that no query sees; query rows [B|1,Sq] that see nothing; the keys [first,last) of each."""

    blocks: Blocks
    hidden: torch.Tensor
    blind: torch.Tensor
    first: torch.Tensor
    last: torch.Tensor


def _kept(holder: Any, key: Any, made: Callable[[], Visibility], size: tuple[int, int, int]) -> _Seen:
    """What a visibility comes to, once for all layers."""
    seen: _Seen = derived(holder, key, _outside_graphs(partial(_seen, made, size)))
    return seen


def _seen(made: Callable[[], Visibility], size: tuple[int, int, int]) -> _Seen:
    seen = made()
    blocks = of_visibility(seen, size[0], size[1])
    return _Seen(blocks, seen.seen_keys.logical_not(), seen.blind_rows, seen.first, seen.last)


def _outside_graphs(build: Callable[[], Any]) -> Callable[[], Any]:
    """`build`, which refuses to run while a graph is captured: what it makes must outlive that graph."""

    def outside() -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
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


def _objections(request: Request, machine: Machine) -> tuple[str, ...]:
    reasons = []
    if request.structure_facts.spans and not request.structure_facts.host:
        reasons.append("spans of documents need their lengths on the host (Packed.from_lengths)")
    if machine.arch and machine.arch in ("sm_50", "sm_52", "sm_60", "sm_61", "sm_70", "sm_75"):
        reasons.append(f"its kernels need sm_80 or later, this is {machine.arch}")
    return tuple(reasons)


_FEATURES = Features(
    causal=True, window=True, softcap=True, lse=True, gqa=True, v_dim=True, backward=True, deterministic=True,
    out=True, capture=True, dtypes=frozenset({"bfloat16", "float16", "float32"}), head_dims=range(16, 257, 8),
)  # fmt: skip

#: Function, kinds, whether a window combines with them.
_SLOTS = (
    ("dense", {"dense"}, True),
    ("prefix_kv", {"prefix_kv"}, True),
    ("key_padding", {"key_padding"}, True),
    ("mask", {"mask"}, True),
    ("packed", {"packed"}, True),
    ("spans", {"spans"}, False),
    ("packed", {"packed", "spans"}, False),
)


def backend() -> Backend:
    """The backend `flex`. A first call of its kind compiles for seconds, so automatic choice takes it late."""
    return Backend(
        "flex",
        tuple(
            Slot(f"{__name__}:{function}", replace(_FEATURES, kinds=frozenset(kinds), window=window))
            for function, kinds, window in _SLOTS
        ),
        requires=(Requires("triton", "", "torch's CUDA wheels bring it"),),
        check=_objections,
        tolerances={"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-5},
    )
