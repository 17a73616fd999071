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
    call: Callable[..., tuple[torch.Tensor, torch.Tensor, Any, Any]] = operator._op
    return call


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
    q, k, v = _reachable(q), _reachable(k), _reachable(v)
    left, right = (-1, -1) if window is None else _sides(window)
    place = out if out is None or _walkable(out) else None
    result, lse, _, _ = _operator()(
        q, k, v, None, None, None, place, None, None, None, None, None, None, None, None, None, None, None, None, None,
        None, None, None, scale, causal, left, right, 0, softcap, False, None, _splits(q), None, 0,
    )  # fmt: skip
    return _placed(result, place, out), lse if need_lse else None


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
    if not every:
        ROWS.clear(result, lse if need_lse else None, used)
    return _placed(result, place, out), lse if need_lse else None


prefix_kv = partial(prefix, dense)
packed = partial(varlen.packed, documents, ROWS)
spans = partial(spans_into, dense)
packed_spans = partial(document_loop, dense)


def _sides(window: tuple[int | None, int | None]) -> tuple[int, int]:
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


def _splits(q: torch.Tensor) -> int:
    """1, unless the queries leave most of the device idle: then 0, the operator's own number."""
    batch, rows, heads, _ = q.shape
    return 1 if not BUILD.split or batch * heads * -(-rows // _TILE) >= _BUSY else 0


def _walkable(tensor: torch.Tensor) -> bool:
    """Whether the copy engine reaches it: a dense last axis, rows that begin at 16-byte boundaries (8 elements)."""
    *outer, last = tensor.stride()
    steps = 0
    for step in outer:
        steps |= step
    return last == 1 and not (steps & 7 or tensor.data_ptr() & 15)


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
            Slot(f"{__name__}:{function}", replace(_FEATURES, kinds=frozenset(kinds), **changed))
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
