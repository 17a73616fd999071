"""FlashAttention-3 through its raw operator: dense, prefix padding without a copy, packed documents, spans, fp8."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

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
    positive_scale,
    prefix,
    spans_into,
    varlen,
)
from polyattn_cuda.fa3_build import FA3Build, installed_build
from polyattn_cuda.repair import repair_documents, repair_samples
from polyattn_cuda.rows import ROWS

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None

BUILD: FA3Build = installed_build()

#: The operator's arguments in order; it is called by position, since naming them costs more than the rest of the slot.
_ARGUMENTS = (
    "q", "k", "v", "k_new", "v_new", "q_v", "out", "cu_seqlens_q", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q",
    "seqused_k", "max_seqlen_q", "max_seqlen_k", "page_table", "kv_batch_idx", "leftpad_k", "rotary_cos", "rotary_sin",
    "seqlens_rotary", "q_descale", "k_descale", "v_descale", "softmax_scale", "is_causal", "window_size_left",
    "window_size_right", "attention_chunk", "softcap", "is_rotary_interleaved", "scheduler_metadata", "num_splits",
    "pack_gqa", "sm_margin",
)  # fmt: skip

#: Query tiles of 128 rows, over all heads, that keep a large device busy: with fewer, the keys are split among more
#: programs (the operator's own choice, 0); with more, splitting only costs.
_BUSY = 132
_TILE = 128
#: Keys of a tile that splitting is worth at all.
_MANY_KEYS = 512
#: Rows behind a document's end that a tile of the kernel may reach: its tiles have at most 224 keys. Their values are
#: multiplied by 0, which NaN and infinity survive (seen on an H200).
_REACH = 256


@lru_cache(maxsize=1)
def _operator() -> Callable[..., tuple[torch.Tensor, torch.Tensor, Any, Any]]:
    """The forward, its arguments checked against the installed build's."""
    importlib.import_module(BUILD.extension)
    operator = getattr(torch.ops, BUILD.namespace).fwd.default
    found = tuple(argument.name for argument in operator._schema.arguments)
    if found != _ARGUMENTS:
        raise RuntimeError(
            f"{BUILD.package}: torch.ops.{BUILD.namespace}.fwd takes {found}, but {_ARGUMENTS} is known; "
            "install a build that has them, or choose another backend"
        )
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Meta"):
        torch.library.register_fake(operator.name(), _shapes)
    call: Callable[..., tuple[torch.Tensor, torch.Tensor, Any, Any]] = operator._op
    return call


def _shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    """What the operator returns, for tensors without data: the build registers nothing for them."""
    out, boundaries = rest[3], rest[4]
    rows = q.shape[:-1]
    shape = (rows[1], rows[0]) if boundaries is not None else (rows[0], rows[2], rows[1])
    dtype = torch.bfloat16 if q.element_size() == 1 else q.dtype
    result = q.new_empty(*rows, v.shape[-1], dtype=dtype) if out is None else out
    nothing = q.new_empty(0, dtype=torch.float32)
    return result, q.new_empty(shape, dtype=torch.float32), nothing, nothing


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
    """Every query over every key, at any strides that the device's copy engine can walk."""
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    if not (_walkable(q) and _walkable(k) and _walkable(v)):
        q, k, v = _reachable(q), _reachable(k), _reachable(v)
    left, right = (-1, -1) if window is None else _sides(window)
    place = out if out is None or _walkable(out) else None
    result, lse, _, _ = _operator()(
        q, k, v, None, None, None, place, None, None, None, None, None, None, None, None, None, None, None, None, None,
        None, None, None, scale, causal, left, right, 0, softcap, False, None, _splits(q.shape, k.shape), None, 0,
    )  # fmt: skip
    return _placed(result, place, out), lse if need_lse else None


def bound_dense(request: Request, options: tuple[object, ...]) -> Callable[..., Result] | None:
    """`dense` for one shape: what strides, scale and window decide is decided once."""
    facts = (request.q, request.k, request.v)
    if request.out or request.autocast_dtype or request.scale <= 0.0 or not all(_aligned(f.stride) for f in facts):
        return None
    operator, need_lse = _operator(), request.lse
    left, right = (-1, -1) if request.window is None else _sides(request.window)
    scale, causal, softcap, window = request.scale, request.causal, request.softcap, request.window
    splits = _splits(request.q.shape, request.k.shape)

    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: None, *, meta: None) -> Result:
        plain = type(q) is type(k) is type(v) is torch.Tensor
        if not plain or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
            return dense(
                q, k, v, out, meta=meta, causal=causal, scale=scale, window=window, softcap=softcap,
                need_lse=need_lse, options=options,
            )  # fmt: skip
        result, lse, _, _ = operator(
            q, k, v, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None, None,
            None, None, None, None, scale, causal, left, right, 0, softcap, False, None, splits, None, 0,
        )  # fmt: skip
        return result, lse if need_lse else None

    return run


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
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    q, k, v = _reachable(q), _reachable(k), _reachable(v)
    left, right = (-1, -1) if window is None else _sides(window)
    place = out if out is None or _walkable(out) else None
    result, lse, _, _ = _operator()(
        q, k, v, None, None, None, place, cu_q, cu_k, None, None, None, max_q, max_k, None, None, None, None, None,
        None, None, None, None, scale, causal, left, right, 0, softcap, False, None, 1, None, 0,
    )  # fmt: skip
    repair_documents(
        q, k, v, result, lse if need_lse else None, (causal, scale, window, softcap),
        cu_q=cu_q, cu_k=cu_k, max_q=max_q, reach=_REACH,
    )  # fmt: skip
    return _placed(result, place, out), lse if need_lse else None


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
    if not meta.prefix:
        return varlen.key_padding(
            documents, ROWS, q, k, v, out, meta=meta, causal=causal, scale=scale, window=window, softcap=softcap,
            need_lse=need_lse, options=options,
        )  # fmt: skip
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    q, k, v = _reachable(q), _reachable(k), _reachable(v)
    left, right = (-1, -1) if window is None else _sides(window)
    place = out if out is None or _walkable(out) else None
    used = meta.seqused
    every = meta.queries == "all"
    result, lse, _, _ = _operator()(
        q, k, v, None, None, None, place, None, None, None, None if every else used, used, None, None, None, None,
        None, None, None, None, None, None, None, scale, causal, left, right, 0, softcap, False, None, 1, None, 0,
    )  # fmt: skip
    row_lse = lse if need_lse else None
    if not every:
        ROWS.clear(result, row_lse, used)
    repair_samples(
        q, k, v, result, row_lse, (causal, scale, window, softcap),
        used_q=None if every else used, used_k=used, reach=_REACH,
    )  # fmt: skip
    return _placed(result, place, out), lse if need_lse else None


prefix_kv = partial(prefix, dense)


def packed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None, *, meta: PackedMeta, **call: Any
) -> Result:
    """Documents by their boundaries on the device; a single one, which the host knows, as dense attention on views."""
    if meta.fixed and meta.lengths_q is not None and len(meta.lengths_q) == 1:
        return varlen.one_document(dense, q, k, v, out, meta=meta, **call)
    return varlen.packed(documents, ROWS, q, k, v, out, meta=meta, **call)


spans = partial(spans_into, dense)
packed_spans = partial(document_loop, dense)


def _sides(window: tuple[int | None, int | None]) -> tuple[int, int]:
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


@lru_cache(maxsize=1024)
def _splits(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """1, unless the queries leave most of the device idle before many keys: then 0, the operator's own number."""
    batch, rows, heads, _ = q
    idle = batch * heads * -(-rows // _TILE) < _BUSY and k[1] >= _MANY_KEYS
    return 0 if BUILD.split and idle else 1


@lru_cache(maxsize=1024)
def _aligned(stride: tuple[int, ...]) -> bool:
    """A dense last axis, and rows that begin at 16-byte boundaries (8 elements) where the tensor does."""
    return stride[-1] == 1 and all(step % 8 == 0 for step in stride[:-1])


def _walkable(tensor: torch.Tensor) -> bool:
    """Whether the device's copy engine reaches it; another address ends the process's context, not the call."""
    plain = type(tensor) is torch.Tensor  # others may have no address, only a place in their storage
    start = tensor.data_ptr() if plain else tensor.storage_offset() * tensor.element_size()
    return _aligned(tensor.stride()) and not start & 15


def _reachable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _walkable(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _placed(result: torch.Tensor, place: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    """The caller's buffer where there is one; the operator wrote it, or could not."""
    if out is None:
        return result
    return out if place is out else out.copy_(result)


def backend() -> Backend:
    """The backend `fa3`, as the installed build has it."""
    name, hint = BUILD.package, "pip install fa3-fwd (Linux x86_64, CUDA 13, torch 2.10 or later)"
    return Backend(
        "fa3",
        tuple(
            Slot(
                f"{__name__}:{function}",
                replace(_FEATURES, kinds=frozenset(kinds), **changed),
                _BOUND.get(function, ""),
            )
            for function, kinds, changed in _SLOTS
        ),
        requires=(Requires(name, "", hint),),
        check=_objections,
        tolerances={"bfloat16": 3e-2, "float16": 4e-3},
    )


_FEATURES = Features(
    causal=True, window=BUILD.window, softcap=BUILD.softcap, lse=True, gqa=True, deterministic=True, out=True,
    capture=True, dtypes=frozenset({"bfloat16", "float16"} if BUILD.fp16 else {"bfloat16"}),
    head_dims=range(8, 257, 8),
)  # fmt: skip

_SLOTS: tuple[tuple[str, tuple[str, ...], dict[str, Any]], ...] = (
    ("dense", ("dense",), {}),
    ("prefix_kv", ("prefix_kv",), {}),
    ("key_padding", ("key_padding",), {}),
    ("packed", ("packed",), {}),
    ("spans", ("spans",), {"window": False}),
    ("packed_spans", ("packed", "spans"), {"window": False}),
)


#: Slot -> what binds it to one shape.
_BOUND = {"dense": f"{__name__}:bound_dense"}


def _objections(request: Request, machine: Machine) -> tuple[str, ...]:
    reasons = list(varlen.packs_in_place(request, machine))
    if machine.arch and machine.arch not in _ARCHS:
        reasons.append(f"{machine.arch} is none of the architectures it is built for, {', '.join(_ARCHS)}")
    cuda = machine.versions.get("cuda", "13")
    if BUILD.package == "fa3-fwd" and not cuda.startswith("13"):
        reasons.append(f"fa3-fwd is linked against CUDA 13, and this torch has {cuda}")
    if request.structure_facts.spans and not request.structure_facts.host:
        reasons.append("spans of documents need their lengths on the host (Packed.from_lengths)")
    return tuple(reasons)


_ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90")
