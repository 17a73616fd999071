"""FlashAttention 4: dense, prefix padding without a copy, packed documents, spans; gradients, also of the LSE.

It compiles a kernel at the first call of each dtype, head dim and kind of call, for seconds: `polyattn.warmup` does so
ahead, and a graph can only be captured after it.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch

from polyattn.vendor import (
    Backend,
    Features,
    KeyPaddingMeta,
    Machine,
    PackedMeta,
    Request,
    Requires,
    Slot,
    document_loop,
    flash2,
    is_here,
    positive_scale,
    prefix,
    spans_into,
    varlen,
    varlen_padding,
    walkable,
)
from polyattn_cuda.fa4_package import PACKAGE, broken_install, functions
from polyattn_cuda.repair import repair_documents, repair_samples
from polyattn_cuda.rows import ROWS

Result = flash2.Result
Window = flash2.Window

#: Why the installed package cannot run; empty where it can.
BROKEN: str = broken_install()

#: Rows behind a document's end that a tile of its kernels may reach: they have at most 144 keys. Such rows get the
#: weight 0, and 0 times NaN is NaN.
_REACH = 256


class Attend(Protocol):
    """q [B,Sq,H,D] or [T,H,D], k, v likewise -> out, lse | None; `lengths` are the package's own keywords."""

    def __call__(
        self,
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
        **lengths: Any,
    ) -> Result: ...


def forward(
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
    **lengths: Any,
) -> Result:
    """Without gradients; an `out` whose rows it cannot reach is copied into."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    left, right = flash2.bounded(window)
    place = out if out is None or walkable(out) else None
    with _current(q):
        result, lse, *_ = functions().forward(
            q=q, k=k, v=v, softmax_scale=scale, causal=causal, window_size_left=left, window_size_right=right,
            softcap=softcap, num_splits=1, return_lse=need_lse, out=place, **lengths,
        )  # fmt: skip
    if out is not None:
        result = out if place is out else out.copy_(result)
    return result, lse if need_lse else None


def differentiable(
    deterministic: bool,
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
    **lengths: Any,
) -> Result:
    """With gradients of q, k, v through the output and the LSE."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    call = functions().varlen if lengths else functions().dense
    with _current(q):
        result, lse = call(
            q=q, k=k, v=v, softmax_scale=scale, causal=causal, window_size=flash2.bounded(window),
            softcap=softcap, num_splits=1, deterministic=deterministic, return_lse=need_lse, **lengths,
        )  # fmt: skip
    return (result if out is None else out.copy_(result)), lse if need_lse else None


def batched(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    options: tuple[object, ...],
    **call: Any,
) -> Result:
    """A slot for "dense", without the keys before every query's window: hidden ones still take part with weight 0."""
    k, v = flash2.within_reach(q, k, v, call["window"])
    return attend(q, k, v, out, **call)


def documents(
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
    window: Window,
    softcap: float,
    need_lse: bool,
) -> Result:
    """The varlen kernel of `polyattn.vendor.varlen`."""
    result, lse = forward(
        q, k, v, out, causal=causal, scale=scale, window=window, softcap=softcap, need_lse=need_lse,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, max_seqlen_q=max_q, max_seqlen_k=max_k,
    )  # fmt: skip
    repair_documents(
        q, k, v, result, lse, (causal, scale, window, softcap), cu_q=cu_q, cu_k=cu_k, max_q=max_q, reach=_REACH
    )
    return result, lse


def key_padding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Prefixes in place, by their lengths on the device; padding with holes packed."""
    call: dict[str, Any] = {
        "causal": causal, "scale": scale, "window": window, "softcap": softcap, "need_lse": need_lse,
    }  # fmt: skip
    if not meta.prefix:
        return varlen_padding.key_padding(documents, ROWS, q, k, v, out, meta=meta, options=options, **call)
    used = meta.seqused
    used_q = None if meta.queries == "all" else used
    result, lse = forward(q, k, v, out, seqused_q=used_q, seqused_k=used, **call)
    if used_q is not None:
        ROWS.clear(result, lse, used)
    repair_samples(
        q, k, v, result, lse, (causal, scale, window, softcap), used_q=used_q, used_k=used, reach=_REACH
    )  # fmt: skip
    return result, lse


def differentiable_padding(
    attend: Attend,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: KeyPaddingMeta,
    options: tuple[object, ...],
    **call: Any,
) -> Result:
    """A slot for prefixes with gradients: what lies behind them is 0, since the backward's tiles reach it too."""
    used = meta.seqused
    kept = (torch.arange(k.shape[1], device=k.device) < used.unsqueeze(1)).unsqueeze(-1).unsqueeze(-1)
    k, v = k.where(kept, 0.0), v.where(kept, 0.0)
    if meta.queries == "all":
        return attend(q, k, v, out, seqused_k=used, **call)
    result, lse = attend(q.where(kept, 0.0), k, v, None, seqused_q=used, seqused_k=used, **call)
    result = result.where(kept, 0.0)
    lse = None if lse is None else lse.where(kept.flatten(1).unsqueeze(1), float("-inf"))
    return (result if out is None else out.copy_(result)), lse


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *, meta: PackedMeta, **call: Any
) -> Result:
    """Documents by their boundaries on the device; a single one, which the host knows, as dense attention on views."""
    if meta.fixed and meta.lengths_q is not None and len(meta.lengths_q) == 1:
        return varlen.one_document(dense, q, k, v, out, meta=meta, **call)
    return varlen.packed(partial(flash2.documents, documents), ROWS, q, k, v, out, meta=meta, **call)


#: Its backward adds up in any order, or in one, which is slower.
_fast, _steady = partial(differentiable, False), partial(differentiable, True)

dense = partial(batched, forward)
dense_grad, dense_grad_steady = partial(batched, _fast), partial(batched, _steady)
prefix_kv = partial(prefix, dense)
prefix_kv_grad, prefix_kv_grad_steady = partial(prefix, dense_grad), partial(prefix, dense_grad_steady)
key_padding_grad = partial(differentiable_padding, _fast)
key_padding_grad_steady = partial(differentiable_padding, _steady)
spans = partial(spans_into, dense)
spans_grad, spans_grad_steady = partial(spans_into, dense_grad), partial(spans_into, dense_grad_steady)
packed_spans = partial(document_loop, dense)
#: One by one: a tile of one document holds rows of the next, whose NaN would reach its gradients.
packed_grad = packed_spans_grad = partial(document_loop, dense_grad)
packed_grad_steady = packed_spans_grad_steady = partial(document_loop, dense_grad_steady)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: the architectures and the head dims of each, and a package that is not all there."""
    reasons = [BROKEN] if BROKEN and is_here(machine, PACKAGE, "flash_attn.cute") else []
    reasons += varlen_padding.packs_in_place(request, machine)
    if machine.arch and not _serves(machine.arch):
        reasons.append(f"{machine.arch} is none of the architectures this backend serves, sm_90 and sm_10x")
    elif machine.arch.startswith("sm_10") and not _fits_blackwell(request.head_dim, request.v_head_dim):
        sizes = f"{request.head_dim} and {request.v_head_dim}"
        reasons.append(f"head_dims {sizes} are out of {machine.arch}'s kernels: up to 128, 192 and 128, 256 and 256")
    facts = request.structure_facts
    one_by_one = facts.spans or (request.grad and request.structure_kind == "packed")
    if one_by_one and not facts.host:
        reasons.append("spans and gradients of documents need their lengths on the host (Packed.from_lengths)")
    if one_by_one and facts.capacity and request.capturing:
        reasons.append("a captured graph would keep the documents' lengths, which spans and gradients go by")
    if request.structure_kind == "key_padding" and request.grad and not facts.prefix:
        reasons.append("gradients of padding with holes would cross from one row's tiles into the next")
    return tuple(reasons)


def _serves(arch: str) -> bool:
    return arch.startswith(("sm_90", "sm_10"))


def _fits_blackwell(dim: int, v_dim: int) -> bool:
    return max(dim, v_dim) <= 128 or (dim, v_dim) in ((192, 128), (256, 256))


def _slots() -> tuple[Slot, ...]:
    """Each structure without gradients, with them, and with the same ones run to run."""
    features = Features(
        causal=True, window=True, softcap=True, lse=True, gqa=True, v_dim=True, deterministic=True, out=True,
        capture=True, dtypes=flash2.DTYPES, head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    with_grad = replace(features, backward=True, v_dim=False)
    kinds = {
        "dense": {"dense"}, "prefix_kv": {"prefix_kv"}, "key_padding": {"key_padding"}, "packed": {"packed"},
        "spans": {"spans"}, "packed_spans": {"packed", "spans"},
    }  # fmt: skip
    slots = []
    for name, kind in kinds.items():
        own: dict[str, Any] = {"kinds": frozenset(kind), "window": "spans" not in kind}
        slots += [
            Slot(f"{__name__}:{name}", replace(features, **own)),
            Slot(f"{__name__}:{name}_grad", replace(with_grad, deterministic=False, **own)),
            Slot(f"{__name__}:{name}_grad_steady", replace(with_grad, **own)),
        ]
    return tuple(slots)


def backend() -> Backend:
    """`cuda:fa4`."""
    hint = 'pip install "flash-attn-4>=4.0.0b30" "nvidia-cutlass-dsl[cu13]" (pre-releases; Linux)'
    return Backend(
        "fa4",
        _slots(),
        requires=(Requires(PACKAGE, "4.0.0b30", hint),),
        check=check,
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )


def _current(tensor: torch.Tensor) -> Any:
    """Its device as the current one, which its launches go to."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)
