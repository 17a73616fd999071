"""Intel Extension for PyTorch 2.8, retired: its packed attention, only where every build of it is right.

Its CPU build drops the scale and aligns causal at the top left, its XPU build hands both to a kernel. So it is told its
own default scale, with q multiplied by a power of two, which loses nothing; and causal only between as many queries as
keys, where both corners are one: dense calls are made so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from math import frexp
from typing import Any

import torch
from torch.nn.functional import pad

from polyattn.vendor import (
    TORCH_ROWS,
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    empty_attention,
    loaded_last,
    prefix,
    sight,
    varlen,
    varlen_padding,
)

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None

PACKAGE = "intel-extension-for-pytorch"
_MODULE = "intel_extension_for_pytorch.llm.functional"
#: Powers of two that q may be multiplied by; float16 has too few exponents for any but 1.
_MOST = 2.0**16


@lru_cache(maxsize=1)
def _operator() -> Callable[..., torch.Tensor]:
    function: Callable[..., torch.Tensor] = importlib.import_module(_MODULE).varlen_attention
    return function


def factor(scale: float, head_dim: int) -> float:
    """What q is multiplied by, so that the package's default scale does the rest."""
    usual: float = head_dim**-0.5
    return scale / usual


def exact(times: float, dtype: str) -> bool:
    """Whether multiplying q by this loses nothing: 0, a sign, or a power of two that the dtype has room for."""
    if times in (0.0, 1.0, -1.0):
        return True
    return dtype != "float16" and 1 / _MOST <= abs(times) <= _MOST and abs(frexp(times)[0]) == 0.5


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
    """The varlen kernel of `polyattn.vendor.varlen`, for what `check` lets through."""
    if window is not None or softcap or need_lse:
        raise ValueError(f"IPEX takes no window, softcap or LSE here, asked {window}, {softcap}, {need_lse}")
    if q.shape[0] == 0 or k.shape[0] == 0 or max_k == 0:
        result, _ = empty_attention(q, k, v, False)
        return (result if out is None else out.copy_(result)), None
    times = factor(scale, q.shape[-1])
    place = out if out is not None and out.is_contiguous() else q.new_empty(q.shape)
    _operator()(
        query=(q if times == 1.0 else q * times).contiguous(), key=k.contiguous(), value=v.contiguous(), out=place,
        seqlen_q=cu_q, seqlen_k=cu_k, alibi_slopes=None, max_seqlen_q=max_q, max_seqlen_k=max_k, pdropout=0.0,
        softmax_scale=q.shape[-1] ** -0.5, zero_tensors=False, is_causal=causal, return_softmax=False, gen_=None,
    )  # fmt: skip
    if cu_q is not cu_k:  # causal calls share their boundaries
        sight.blank_blind(place, None, cu_q, cu_k, k.shape[0], causal, None)
    return (place if out is None or out is place else out.copy_(place)), None


def dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: None,
    causal: bool,
    **call: Any,
) -> Result:
    """Every query over every key. Causal runs on a square: rows are put before few queries, and left out of many."""

    def square(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None) -> Result:
        return varlen.batched(documents, q, k, v, out, meta=meta, causal=causal, **call)

    more = q.shape[1] - k.shape[1]
    if not causal or more == 0:
        return square(q, k, v, out)
    if more < 0:
        result = square(pad(q, (0, 0, 0, 0, -more, 0)), k, v, None)[0].narrow(1, -more, q.shape[1])
    else:
        result = pad(square(q.narrow(1, more, k.shape[1]), k, v, None)[0], (0, 0, 0, 0, more, 0))
    return (result if out is None else out.copy_(result)), None


prefix_kv = partial(prefix, dense)
packed = partial(varlen.packed, documents, TORCH_ROWS)
key_padding = partial(varlen_padding.key_padding, documents, TORCH_ROWS)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: the build and its torch, scales it would drop, causal off the diagonal, row tails."""
    return (*_build(machine), *_scale(request), *_rows(request), *varlen_padding.packs_in_place(request, machine))


def _build(machine: Machine) -> tuple[str, ...]:
    found, torch_version = machine.versions.get(PACKAGE, ""), machine.versions.get("torch", "")
    if not found:
        return ()
    reasons = []
    if "xpu" not in found:
        reasons.append(f"{PACKAGE} {found} is its CPU build; the XPU build, of Intel's own index, has +xpu in its name")
    release = found.split(".")[:2]
    if torch_version and torch_version.split(".")[:2] != release:
        reasons.append(f"{PACKAGE} {found} loads beside torch {'.'.join(release)} only, and this is {torch_version}")
    return tuple(reasons)


def _scale(request: Request) -> tuple[str, ...]:
    if exact(factor(request.scale, request.head_dim), request.dtype):
        return ()
    usual = request.head_dim**-0.5
    ways = f"only {usual}" if request.dtype == "float16" else f"only {usual} times a power of two"
    return (f"scale {request.scale} is not honoured by every build of it, {ways}",)


def _rows(request: Request) -> tuple[str, ...]:
    facts, kind = request.structure_facts, request.structure_kind
    reasons = []
    if kind == "packed" and (not facts.host or facts.capacity):
        reasons.append("document boundaries that only the device knows may leave rows over, which it refuses")
    apart = {"packed": not facts.same_lengths, "key_padding": facts.queries == "all"}
    if request.causal and apart.get(kind, False):
        reasons.append("causal between different numbers of queries and keys is aligned at the top left")
    return tuple(reasons)


def backend() -> Backend:
    """`xpu:ipex`."""
    taken = Features(
        causal=True, out=True, dtypes=frozenset({"float16", "bfloat16"}), head_dims=range(32, 257, 32)
    )  # fmt: skip
    slots = tuple(
        Slot(f"{__name__}:{kind}", replace(taken, kinds=frozenset({kind})))
        for kind in ("dense", "prefix_kv", "packed", "key_padding")
    )
    hint = "it is retired: prefer torch's own XPU build with vllm-xpu-kernels"
    return Backend(
        "ipex",
        slots,
        requires=(Requires(PACKAGE, "2.8", hint),),
        check=loaded_last(check, slots, PACKAGE, _MODULE, _operator),
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
