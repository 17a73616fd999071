"""From the caller's tensors to a frozen Request: shapes, dtypes and devices checked, the structure's kind settled."""

from __future__ import annotations

from dataclasses import replace

import torch

from polyattn.arguments import Arguments
from polyattn.door.request import Request, StructureFacts, TensorFacts
from polyattn.structures import Structure
from polyattn.structures.host_data import dtype_name
from polyattn.whole_video import densely

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_LAYOUTS = {
    "packed": "packed [T,H,D] (or [1,T,H,D])",
    "paged": "q [B,Sq,H,D] or [T,H,D], and page pools k, v [pages,page_size,Hk,D]",
}


def request_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    structure: Structure | None,
    arguments: Arguments,
    *,
    scale: float,
    lse: bool,
    out: torch.Tensor | None,
    autocast: torch.dtype | None,
    quant: str | None,
    capturing: bool,
    compiling: bool = False,
) -> Request:
    """The request of a call whose tensors have been checked by `check_tensors` and `check_out`."""
    kind, facts = settle(structure, q.shape, k.shape, arguments)
    squeeze = kind == "packed" and q.dim() == 4
    wants_grad = q.requires_grad or k.requires_grad or v.requires_grad or facts.mask_grad
    wants_grad = wants_grad or (facts.video is not None and facts.video.gate_grad)
    request = Request(
        _facts(q.squeeze(0) if squeeze else q),
        _facts(k.squeeze(0) if squeeze else k),
        _facts(v.squeeze(0) if squeeze else v),
        device=str(q.device),
        structure_kind=kind,
        structure_facts=facts,
        causal=arguments.causal,
        scale=scale,
        window=arguments.window,
        softcap=arguments.softcap,
        lse=lse,
        out=out is not None,
        grad=wants_grad and torch.is_grad_enabled(),
        autocast_dtype=None if autocast is None else dtype_name(autocast),
        deterministic=arguments.deterministic,
        quant=quant,
        options=arguments.options,
        capturing=capturing,
        compiling=compiling,
    )
    return densely(request) if facts.video is not None and facts.video.runs_dense else request


def settle(
    structure: Structure | None, q_shape: tuple[int, ...], k_shape: tuple[int, ...], arguments: Arguments
) -> tuple[str, StructureFacts]:
    """The kind a slot must take, which may be simpler than the structure's own."""
    if structure is None:
        return "dense", StructureFacts()
    kind, facts = structure.kind, structure.facts
    if kind == "key_padding":
        if facts.common_prefix == k_shape[1]:
            return "dense", StructureFacts()
        # a shorter key tensor would move the diagonal, unless the queries are shortened with it: no slot meets that
        moves = facts.queries == "all" and (arguments.causal or arguments.window is not None)
        if facts.common_prefix is not None and not moves:
            return "prefix_kv", facts
    if facts.full:
        return "dense", StructureFacts()
    if kind == "mask" and facts.mask_dtype != "bool":
        return "bias", facts
    if kind == "paged":
        has_lengths = getattr(structure, "q_lengths", None) is not None
        layout = "packed" if len(q_shape) == 3 else "padded" if has_lengths else "batched"
        return kind, replace(facts, query_layout=layout, page_size=k_shape[1])
    return kind, facts


def check_tensors(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: Structure | None, autocast: bool
) -> None:
    """Raise TypeError or ValueError, naming what was given and what is accepted, unless the tensors fit together."""
    check_types(q, k, v)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not tensor.dtype.is_floating_point:
            raise TypeError(f"{name}: a floating dtype is needed, got {dtype_name(tensor.dtype)}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k, v: one device is needed, got {q.device}, {k.device} and {v.device}")
    if not q.dtype == k.dtype == v.dtype and not autocast:
        names = ", ".join(f"{name} {dtype_name(t.dtype)}" for name, t in (("q", q), ("k", k), ("v", v)))
        raise TypeError(f"q, k, v: one dtype is needed (or autocast), got {names}")
    if structure is not None and not isinstance(structure, Structure):
        raise TypeError(
            f"structure: a polyattn structure is needed, got {type(structure).__name__}; wrap a mask tensor in pa.Mask"
        )
    kind = "dense" if structure is None else structure.kind
    given = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    _check_ranks(q, k, v, kind, given)
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q, k: one head_dim is needed, got {given}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k, v: the same rows and heads are needed, got {given}")
    if q.shape[-1] == 0 or v.shape[-1] == 0:
        raise ValueError(f"q, k, v: head_dim must be at least 1, got {given}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(f"q, k: query heads must be a multiple of KV heads, got {heads} and {kv_heads}")
    if kind != "paged" and q.dim() == 4 and q.shape[0] != k.shape[0]:
        raise ValueError(f"q, k, v: one batch size is needed, got {given}")


def check_types(q: object, k: object, v: object) -> None:
    """Raise TypeError unless all three are strided tensors."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name}: a tensor is needed, got {type(tensor).__name__}")
        if tensor.layout is not torch.strided:
            raise TypeError(f"{name}: a strided tensor is needed, got layout {tensor.layout}")


def shares_memory(out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `out` lies in the same storage as an input, so that a kernel might write what it still reads."""
    if torch.compiler.is_compiling() or type(out) is not torch.Tensor or out.is_meta:  # no address to compare
        return False
    memory = out.untyped_storage().data_ptr()
    return memory != 0 and any(memory == tensor.untyped_storage().data_ptr() for tensor in (q, k, v))


def check_out(
    out: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype, grad: bool
) -> None:
    """Raise unless `out` can take the result."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out: a tensor is needed, got {type(out).__name__}")
    want = (*q.shape[:-1], v.shape[-1])
    if tuple(out.shape) != want or out.dtype != dtype or out.device != q.device:
        raise ValueError(
            f"out: {list(want)} {dtype_name(dtype)} on {q.device} is needed, "
            f"got {list(out.shape)} {dtype_name(out.dtype)} on {out.device}"
        )
    if out is q or out is k or out is v:
        raise ValueError("out: it must not be one of q, k and v, which are still read while it is written")
    if any(step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(f"out: its elements share memory (strides {list(out.stride())}), so that it cannot be written")
    if grad or out.requires_grad:
        raise ValueError("out: gradients do not flow into a given buffer; call without out= or under torch.no_grad()")


def autocast_dtype(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.dtype | None:
    """The dtype that autocast imposes on this call, as SDPA takes it; None outside autocast. float64 is left alone."""
    kind = q.device.type
    if kind == "meta" or torch.float64 in (q.dtype, k.dtype, v.dtype) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _facts(tensor: torch.Tensor) -> TensorFacts:
    return TensorFacts(tuple(tensor.shape), tuple(tensor.stride()), dtype_name(tensor.dtype))


def _check_ranks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: str, given: str) -> None:
    ranks = (q.dim(), k.dim(), v.dim())
    if kind == "packed":
        fits = ranks == (3, 3, 3) or (ranks == (4, 4, 4) and q.shape[0] == k.shape[0] == v.shape[0] == 1)
    elif kind == "paged":
        fits = ranks[0] in (3, 4) and ranks[1:] == (4, 4)
    else:
        fits = ranks == (4, 4, 4)
    if not fits:
        raise ValueError(f"q, k, v: {kind} attention takes {_LAYOUTS.get(kind, '[B,S,H,D]')}, got {given}")
