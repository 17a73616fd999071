"""Key padding over a kernel for packed documents: kept rows side by side, one document a sample."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from polyattn.backends.calls import Result, wants_grad, written
from polyattn.backends.derived import derived
from polyattn.backends.empty import empty_attention
from polyattn.backends.row_ops import RowOps
from polyattn.backends.varlen import VarlenKernel, even_boundaries, flat_rows
from polyattn.door.platform import Machine
from polyattn.door.request import Request
from polyattn.structures.key_padding import KeyPaddingMeta
from polyattn.structures.transfer import refuse_in_capture


def key_padding(
    kernel: VarlenKernel,
    rows: RowOps,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    **call: Any,
) -> Result:
    """A slot for "key_padding": kept keys side by side, one document a row; what `packs_in_place` lets through.

    Few padded queries are computed with the others, and their rows blanked.
    """
    if meta.queries != "all" and _few_holes(rows.few, meta, call["causal"], call["window"], q, k, v):
        result, lse = _queries_in_place(kernel, rows, q, k, v, out, meta=meta, **call)
        rows.blank(result, lse, meta.keep)
        return result, lse
    return packed_padding(kernel, rows, q, k, v, out, meta=meta, **call)


def packed_padding(
    kernel: VarlenKernel,
    rows: RowOps,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    **call: Any,
) -> Result:
    """As `key_padding`, for a kernel that padded queries would disturb: it sees none of them."""
    if meta.queries == "all":
        return _queries_in_place(kernel, rows, q, k, v, out, meta=meta, **call)
    batch, length = q.shape[:2]
    kept = derived(meta, "kept", lambda: kept_rows(meta))
    if kept.positions.shape[0] == 0:
        result, lse = empty_attention(q, k, v, call["need_lse"])
        return written(out, result), lse
    tokens, keys, values = rows.pack((q, k, v), kept.positions)
    lengths: dict[str, Any] = {"cu_q": kept.cu, "cu_k": kept.cu, "max_q": kept.longest, "max_k": kept.longest}
    result, lse = kernel(tokens, keys, values, None, **lengths, **_of_kernel(call))
    return rows.unpack(result, lse, kept.positions, out, batch, length)


def _queries_in_place(
    kernel: VarlenKernel,
    rows: RowOps,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    **call: Any,
) -> Result:
    """All queries over the kept keys of their sample, which alone are packed."""
    batch, length = q.shape[:2]
    kept = derived(meta, "kept", lambda: kept_rows(meta))
    if kept.positions.shape[0] == 0:
        result, lse = empty_attention(q, k, v, call["need_lse"])
        return written(out, result), lse
    keys, values = rows.pack((k, v), kept.positions)
    cu_q = derived(meta, ("all", length), lambda: even_boundaries(batch, length, q.device))
    place = None if out is None else flat_rows(out)
    result, lse = kernel(
        q.flatten(0, 1), keys, values, place,
        cu_q=cu_q, cu_k=kept.cu, max_q=length, max_k=kept.longest, **_of_kernel(call),
    )  # fmt: skip
    lse = None if lse is None else lse.unflatten(1, (batch, length)).transpose(0, 1)
    if out is None:
        return result.unflatten(0, (batch, length)), lse
    return out if place is not None else out.copy_(result.unflatten(0, (batch, length))), lse


def _of_kernel(call: dict[str, Any]) -> dict[str, Any]:
    """What a slot was called with, without the options, which a varlen kernel does not take."""
    return {name: value for name, value in call.items() if name != "options"}


def _few_holes(
    few: int,
    meta: KeyPaddingMeta,
    causal: bool,
    window: tuple[int | None, int | None] | None,
    *tensors: torch.Tensor,
) -> bool:
    if not few or meta.lengths is None or causal or window is not None or wants_grad(*tensors):
        return False
    return meta.keep.numel() - sum(meta.lengths) <= few * len(meta.lengths)


def packs_in_place(request: Request, machine: Machine) -> tuple[str, ...]:
    """Against padding that packing would move: causal and windows use the positions of the tensors as passed."""
    facts = request.structure_facts
    if request.structure_kind != "key_padding" or not (request.causal or request.window is not None):
        return ()
    if facts.prefix and facts.queries != "all":
        return ()
    return ("packing the kept keys would move the positions that causal and window use",)


class KeptRows(NamedTuple):
    """Kept rows of a padded batch, on the device.

    positions  [n] int64: their flat positions b*S+s; past the last kept row, a position that does not exist
    cu         int32 [B+1]: the rows of each sample once packed
    longest    at least the most rows of a sample
    """

    positions: torch.Tensor
    cu: torch.Tensor
    longest: int


def kept_rows(meta: KeyPaddingMeta) -> KeptRows:
    """From what the host knows; else on the device, in as many rows as the tensors have."""
    if meta.lengths is not None:
        return KeptRows(meta.indices, meta.cu_seqlens, max(meta.lengths, default=0))
    refuse_in_capture(meta.keep.device)
    flat = meta.keep.flatten()
    place = torch.where(flat, flat.cumsum(0) - 1, flat.numel())  # a spare slot takes the hidden ones
    positions = torch.arange(flat.numel(), device=flat.device)
    index = torch.full((flat.numel() + 1,), flat.numel(), dtype=torch.int64, device=flat.device)
    index.scatter_(0, place, positions)
    index[-1] = flat.numel()
    return KeptRows(index[:-1], pad(meta.seqused.cumsum(0, dtype=torch.int32), (1, 0)), meta.keep.shape[1])
