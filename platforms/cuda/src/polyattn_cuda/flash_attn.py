"""FlashAttention 2, the package flash-attn: dense, padding and documents packed, pages of 256 rows, gradients."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    positive_scale,
    prefix,
    varlen,
    varlen_padding,
)
from polyattn_cuda import flash2
from polyattn_cuda.flash2 import Result, Window
from polyattn_cuda.layout import reachable
from polyattn_cuda.rows import ROWS

PACKAGE = "flash-attn"
_EXTENSION = "flash_attn_2_cuda"
#: Devices whose shared memory does not hold a backward's tiles of wider heads.
_SMALL = ("sm_86", "sm_87", "sm_89", "sm_12")
_WIDEST_BACKWARD = 192


def missing_extension() -> str:
    """Why the distribution, although it is here, has no kernels; empty where it has, or is not here at all."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return ""
    if importlib.util.find_spec(_EXTENSION) is not None:
        return ""
    return f"{PACKAGE} {found} is installed without its extension {_EXTENSION}: it was built with SKIP_CUDA_BUILD"


#: Why the installed package cannot run; empty where it can.
BROKEN: str = missing_extension()


@lru_cache(maxsize=1)
def _bound() -> tuple[Any, Any]:
    module = importlib.import_module("flash_attn.flash_attn_interface")
    return module.flash_attn_func, module.flash_attn_varlen_func


def batched(
    deterministic: bool,
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
    """A slot for "dense"; it writes no buffer, so that `out` is copied into. `deterministic`: its gradients.

    Windows over fewer keys than queries run as documents, whose most keys can be stated (`flash2.most_keys`).
    """
    if window is not None and q.shape[1] > k.shape[1]:
        return varlen.batched(
            partial(documents, deterministic), q, k, v, out, meta=meta, causal=causal, scale=scale, window=window,
            softcap=softcap, need_lse=need_lse, options=options,
        )  # fmt: skip
    attend, _ = _bound()
    k, v = flash2.within_reach(q, k, v, window)
    if scale <= 0.0:
        q, scale = positive_scale(q, scale)
    answer = attend(
        q=reachable(q), k=reachable(k), v=reachable(v),
        **_asked(deterministic, causal, scale, window, softcap, need_lse),
    )  # fmt: skip
    result, lse = _unwrapped(answer, need_lse)
    return (result if out is None else out.copy_(result)), lse


def documents(
    deterministic: bool,
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
    """The varlen kernel of `polyattn.vendor.varlen`; `out` is copied into."""
    asked = _asked(deterministic, causal, scale, window, softcap, need_lse)
    most = flash2.most_keys(window, max_q, max_k)
    result, lse = _of_documents(q, reachable(k), reachable(v), cu_q, cu_k, max_q, most, asked)
    return (result if out is None else out.copy_(result)), lse


def pages(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    table: torch.Tensor,
    used: torch.Tensor,
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
    """The paged kernel of `polyattn_cuda.flash2`; `cu_k` says what `used` says."""
    asked = _asked(False, causal, scale, window, softcap, need_lse) | {"block_table": table}
    return _of_documents(q, k, v, cu_q, cu_k, max_q, flash2.most_keys(window, max_q, max_k), asked)


def _of_documents(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    max_k: int,
    asked: dict[str, Any],
) -> Result:
    _, attend = _bound()
    if asked["softmax_scale"] <= 0.0:
        q, asked["softmax_scale"] = positive_scale(q, asked["softmax_scale"])
    answer = attend(
        q=reachable(q), k=k, v=v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
        max_seqlen_q=flash2.least_queries(q, k, max_q), max_seqlen_k=max_k, **asked,
    )  # fmt: skip
    return _unwrapped(answer, asked["return_attn_probs"])


def _asked(
    deterministic: bool, causal: bool, scale: float, window: Window, softcap: float, need_lse: bool
) -> dict[str, Any]:
    """What both functions take, in the package's words; its "probs" bring the LSE, and are empty without dropout."""
    return {
        "dropout_p": 0.0, "softmax_scale": scale, "causal": causal, "window_size": flash2.sides(causal, window),
        "softcap": softcap, "deterministic": deterministic, "return_attn_probs": need_lse,
    }  # fmt: skip


def _unwrapped(answer: Any, need_lse: bool) -> Result:
    if not need_lse:
        return answer, None
    result, lse, _ = answer
    return result, flash2.normal_lse(lse)


#: Its backward adds up in any order, or in one, which is slower.
_fast, _steady = partial(documents, False), partial(documents, True)

dense, dense_steady = partial(batched, False), partial(batched, True)
prefix_kv, prefix_kv_steady = partial(prefix, dense), partial(prefix, dense_steady)
packed = partial(varlen.packed, partial(flash2.documents, _fast), ROWS)
packed_steady = partial(varlen.packed, partial(flash2.documents, _steady), ROWS)
key_padding = partial(varlen_padding.key_padding, _fast, ROWS)
key_padding_steady = partial(varlen_padding.key_padding, _steady, ROWS)
paged = partial(flash2.paged, pages)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: FlashAttention 2's rules, wide heads' gradients, and a package without its kernels."""
    reasons = [BROKEN] if BROKEN else []
    reasons += flash2.objections(request, machine)
    if request.grad and request.head_dim > _WIDEST_BACKWARD and machine.arch.startswith(_SMALL):
        reasons.append(f"gradients of head_dim {request.head_dim} on {machine.arch}, only up to {_WIDEST_BACKWARD}")
    return tuple(reasons)


def _slots() -> tuple[Slot, ...]:
    """Each structure with an LSE, which has no gradient; with gradients; with the same gradients run to run."""
    forward = Features(
        causal=True, window=True, softcap=True, lse=True, gqa=True, deterministic=True, out=True, capture=True,
        dtypes=flash2.DTYPES, head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    with_grad = replace(forward, lse=False, backward=True)
    slots = []
    for kind in ("dense", "prefix_kv", "packed", "key_padding"):
        kinds = frozenset({kind})
        slots.append(Slot(f"{__name__}:{kind}", replace(forward, kinds=kinds)))
        slots.append(Slot(f"{__name__}:{kind}", replace(with_grad, kinds=kinds, deterministic=False)))
        slots.append(Slot(f"{__name__}:{kind}_steady", replace(with_grad, kinds=kinds)))
    over_pages = replace(forward, kinds=frozenset({"paged"}), capture=False, page_sizes=flash2.PAGE_SIZES)
    return (*slots, Slot(f"{__name__}:paged", over_pages))


def backend() -> Backend:
    """`cuda:flash_attn`."""
    hint = "pip install flash-attn --no-build-isolation (a source distribution; it compiles for hours without a wheel)"
    return Backend(
        "flash_attn",
        _slots(),
        requires=(Requires(PACKAGE, "2.8", hint),),
        check=check,
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
