"""Slots over a kernel for packed documents, the one form that every vendor's flash attention has.

A vendor binds its kernel, and the way it moves rows, to the functions here. `call` is what passes through as it came:
causal, scale, window, softcap, need_lse.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch.nn.functional import pad

from polyattn.backends.calls import Result, SlotCall, wants_grad, written
from polyattn.backends.empty import empty_attention
from polyattn.backends.row_ops import RowOps
from polyattn.structures.base import keep
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.transfer import is_capturing


class VarlenKernel(Protocol):
    """Attention of packed documents: q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv] -> out [T,H,Dv], lse [H,T] | None.

    cu_q, cu_k   int32 [documents + 1] on the device; max_q, max_k: at least the longest document
    out          None, or where to write

    Rows past cu_q[-1] may be left unwritten. A row that sees no key is 0, its LSE -inf.
    """

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        *,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,
        max_k: int,
        causal: bool,
        scale: float,
        window: tuple[int | None, int | None] | None,
        softcap: float,
        need_lse: bool,
    ) -> Result: ...


def packed(
    kernel: VarlenKernel,
    rows: RowOps,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    options: tuple[object, ...],
    **call: Any,
) -> Result:
    """A slot for "packed" without spans. Rows past the last boundary become 0."""
    if meta.cu_q.shape[0] == 1:  # no document at all, which no kernel takes
        result, lse = empty_attention(q, k, v, call["need_lse"])
        return written(out, result), lse
    lengths: dict[str, Any] = {"cu_q": meta.cu_q, "cu_k": meta.cu_k, "max_q": meta.max_q, "max_k": meta.max_k}
    if meta.lengths_q is not None and meta.lengths_k is not None and meta.fixed:
        used = (sum(meta.lengths_q), sum(meta.lengths_k))
        if used == (q.shape[0], k.shape[0]):
            return kernel(q, k, v, out, **lengths, **call)
        return _first_rows(kernel, q, k, v, out, used, **lengths, **call)
    if wants_grad(q, k, v):
        return _inner_rows(kernel, q, k, v, **lengths, **call)
    result, lse = kernel(q, k, v, out, **lengths, **call)
    rows.clear(result.unsqueeze(0), None if lse is None else lse.unsqueeze(0), meta.cu_q[-1:])
    return result, lse


def one_document(
    dense: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: PackedMeta,
    **call: Any,
) -> Result:
    """As `packed`, for a single document whose lengths the host knows, over a dense slot that writes into `out`."""
    assert meta.lengths_q is not None
    assert meta.lengths_k is not None

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, **call: Any) -> Result:
        place = None if out is None else out.unsqueeze(0)
        result, lse = dense(q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), place, meta=None, **call)
        return result.squeeze(0) if out is None else out, None if lse is None else lse.squeeze(0)

    used = (meta.lengths_q[0], meta.lengths_k[0])
    if used == (q.shape[0], k.shape[0]):
        return kernel(q, k, v, out, **call)
    if used[1] == 0:
        result, lse = empty_attention(q, k, v, call["need_lse"])
        return written(out, result), lse
    return _first_rows(kernel, q, k, v, out, used, **call)


def batched(
    kernel: VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    options: tuple[object, ...],
    **call: Any,
) -> Result:
    """A slot for "dense": as many documents of one length as there are samples."""
    batch, queries = q.shape[:2]
    keys = k.shape[1]
    out_rows = None if out is None else flat_rows(out)
    result, lse = kernel(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), out_rows,
        cu_q=even_boundaries(batch, queries, q.device), cu_k=even_boundaries(batch, keys, q.device),
        max_q=queries, max_k=keys, **call,
    )  # fmt: skip
    result = result.unflatten(0, (batch, queries))
    if out is not None:
        result = out if out_rows is not None else out.copy_(result)
    return result, None if lse is None else lse.unflatten(1, (batch, queries)).transpose(0, 1)


#: (samples, rows, device) -> boundaries; a model has a few shapes. The oldest are dropped.
_EVEN_LIMIT = 256
_even: dict[tuple[int, int, torch.device], torch.Tensor] = {}
_fake_mode, _FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE


def even_boundaries(samples: int, rows: int, device: torch.device) -> torch.Tensor:
    """int32 [samples + 1] boundaries of `samples` documents of `rows` rows."""
    key = (samples, rows, device)
    real = _fake_mode(_FAKE) is None  # a fake mode takes no real tensor, and what it makes is none
    if real:
        try:
            return _even[key]
        except KeyError:
            pass
    with torch.inference_mode(False):
        made = torch.arange(samples + 1, dtype=torch.int32, device=device) * rows
    if real and type(made) is torch.Tensor and not is_capturing(device):  # not a graph's own
        keep(_even, _EVEN_LIMIT, key, made)
    return made


def flat_rows(out: torch.Tensor) -> torch.Tensor | None:
    """[B,S,H,D] as [B*S,H,D] over the same memory; None where strides forbid it."""
    return out.flatten(0, 1) if out.stride(0) == out.shape[1] * out.stride(1) or out.shape[0] == 1 else None


def _first_rows(
    kernel: SlotCall,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    used: tuple[int, int],
    **call: Any,
) -> Result:
    """The documents' rows alone, by views; the rows behind them become 0."""
    total, left = q.shape[0], q.shape[0] - used[0]
    keys = max(used[1], 1)  # a kernel wants at least one row, even where no document has one
    if used[0] == 0:
        result, lse = empty_attention(q, k, v, call["need_lse"])
        return written(out, result), lse
    one = (q.narrow(0, 0, used[0]), k.narrow(0, 0, keys), v.narrow(0, 0, keys))
    if wants_grad(q, k, v):
        result, lse = kernel(*one, None, **call)
        result = pad(result, (0, 0, 0, 0, 0, left))
    else:
        result = q.new_empty(total, q.shape[1], v.shape[-1]) if out is None else out
        _, lse = kernel(*one, result.narrow(0, 0, used[0]), **call)
        result.narrow(0, used[0], left).zero_()
    return result, None if lse is None else pad(lse, (0, left), value=float("-inf"))


def _inner_rows(kernel: VarlenKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> Result:
    """With gradients, where only the device knows how many rows the documents have: what lies behind has none."""
    inside_q, inside_k = (
        (torch.arange(rows.shape[0], device=rows.device) < cu[-1]).reshape(-1, 1, 1)
        for rows, cu in ((q, call["cu_q"]), (k, call["cu_k"]))
    )
    result, lse = kernel(q.where(inside_q, 0.0), k.where(inside_k, 0.0), v.where(inside_k, 0.0), None, **call)
    lse = None if lse is None else lse.where(inside_q.reshape(1, -1), float("-inf"))
    return result.where(inside_q, 0.0), lse
