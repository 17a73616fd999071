"""Slots over the portable flash kernel; each is one launch. Importing this imports Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from polyattn.backends.calls import Result
from polyattn.backends.derived import derived
from polyattn.backends.visibility import of_packed
from polyattn.door.request import Request, TensorFacts
from polyattn.kernels import flash
from polyattn.kernels.flash import Scoring, Visibility
from polyattn.kernels.launch import launch_repeated
from polyattn.structures.key_padding import KeyPaddingMeta
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.spans import SpansMeta
from polyattn.structures.transfer import refuse_in_capture

Window = tuple[int | None, int | None] | None


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A slot for "dense"."""
    return flash.batched(q, k, v, out, Scoring(causal, scale, window, softcap), need_lse=need_lse)


def bound_dense(request: Request, options: tuple[object, ...]) -> Callable[..., Result] | None:
    """`dense` for one shape: the launch is made ready once, and then takes addresses."""
    facts = (request.q, request.k, request.v)
    if request.out or request.autocast_dtype or any(one.stride[-1] != 1 for one in facts):
        return None
    device, dtype, need_lse = torch.device(request.device), getattr(torch, request.q.dtype), request.lse
    result_facts = TensorFacts.contiguous((*request.q.shape[:-1], request.v.shape[-1]), request.q.dtype)
    scoring = Scoring(request.causal, request.scale, request.window, request.softcap)
    shape, alike = result_facts.shape, result_facts == request.q
    samples, rows, heads, _ = shape
    lse_shape = (samples, heads, rows)
    launch = flash.batched_launch(
        device, dtype.itemsize, (torch.Size(request.q.shape), torch.Size(request.v.shape)),
        tuple(one.stride for one in (*facts, result_facts)), scoring, request.k.shape[1], need_lse=need_lse,
    )  # fmt: skip

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, *, meta: None) -> Result:
        if not type(q) is type(k) is type(v) is torch.Tensor:
            return flash.batched(q, k, v, out, scoring, need_lse=need_lse)
        result = torch.empty_like(q) if alike else q.new_empty(shape)
        if not need_lse:
            launch_repeated(launch, q, k, v, result)
            return result, None
        lse = torch.empty(lse_shape, dtype=torch.float32, device=device)
        launch_repeated(launch, q, k, v, result, lse)
        return result, lse

    return run


def prefix_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    need_lse: bool,
    options: tuple[object, ...],
    **scoring: Any,
) -> Result:
    """A slot for "prefix_kv": the one length is a number of the launch."""
    length = meta.common_prefix
    seen = Visibility(used_k=length, used_q=None if meta.queries == "all" else length)
    return flash.batched(q, k, v, out, Scoring(**scoring), seen, need_lse=need_lse)


def key_padding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    need_lse: bool,
    options: tuple[object, ...],
    **scoring: Any,
) -> Result:
    """A slot for "key_padding", whoever knows the lengths: prefixes by their lengths, holes by the kept keys."""
    every = meta.queries == "all"
    if meta.prefix:
        seen = Visibility(used_k=meta.seqused, used_q=None if every else meta.seqused)
    else:
        ends = derived(meta, "kept ends", lambda: _kept_ends(meta.keep))
        seen = Visibility(used_k=ends, keep=meta.keep, keep_q=None if every else meta.keep)
    return flash.batched(q, k, v, out, Scoring(**scoring), seen, need_lse=need_lse)


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
    """A slot for "packed", with spans or without, whoever knows the boundaries."""
    seen = flash.ALL
    if meta.spans is not None and any(meta.spans):
        sizes = (q.shape[0], k.shape[0])
        seen = Visibility(ends=derived(meta, ("ends", *sizes), lambda: _span_ends(meta, *sizes)))
    return flash.packed(
        q, k, v, out, Scoring(causal or meta.spans is not None, scale, window, softcap), seen,
        cu_q=meta.cu_q, cu_k=meta.cu_k, max_q=meta.max_q, need_lse=need_lse,
    )  # fmt: skip


def spans(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: SpansMeta,
    need_lse: bool,
    options: tuple[object, ...],
    **scoring: Any,
) -> Result:
    """A slot for "spans": the end of what each row sees is a table."""
    seen = Visibility(ends=meta.visible_end(q.shape[1], k.shape[1]))
    return flash.batched(q, k, v, out, Scoring(**scoring), seen, need_lse=need_lse)


def _kept_ends(keep: torch.Tensor) -> torch.Tensor:
    """int32 [B]: one past the last kept key of each row."""
    refuse_in_capture(keep.device)
    places = torch.arange(1, keep.shape[1] + 1, dtype=torch.int32, device=keep.device)
    return torch.where(keep, places, 0).amax(dim=1).to(torch.int32)


def _span_ends(meta: PackedMeta, queries: int, keys: int) -> torch.Tensor:
    """int32 [T]: the row of k before which each packed query row sees."""
    refuse_in_capture(meta.cu_q.device)
    return of_packed(meta, queries, keys, True, None).last.squeeze(0).to(torch.int32)
