"""FlashAttention-3's raw operator: bound once, its schema checked, and what it asks of tensors."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from polyattn_cuda.fa3_build import FA3Build, installed_build

Result = tuple[torch.Tensor, torch.Tensor | None]
Window = tuple[int | None, int | None] | None

BUILD: FA3Build = installed_build()


#: The operator's arguments in order; it is called by position, since naming them for torch costs more than the rest of
#: the slot.
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
REACH = 256


@lru_cache(maxsize=1)
def operator() -> Callable[..., tuple[torch.Tensor, torch.Tensor, Any, Any]]:
    """The forward, its arguments checked against the installed build's."""
    importlib.import_module(BUILD.extension)
    overload = getattr(torch.ops, BUILD.namespace).fwd.default
    found = tuple(argument.name for argument in overload._schema.arguments)
    if found != _ARGUMENTS:
        raise RuntimeError(
            f"{BUILD.package}: torch.ops.{BUILD.namespace}.fwd takes {found}, but {_ARGUMENTS} is known; "
            "install a build that has them, or choose another backend"
        )
    if not torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "Meta"):
        torch.library.register_fake(overload.name(), _shapes)
    call: Callable[..., tuple[torch.Tensor, torch.Tensor, Any, Any]] = overload._op
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


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    place: torch.Tensor | None,
    *,
    causal: bool,
    scale: float,
    window: Window,
    softcap: float,
    splits: int = 1,
    cu_q: torch.Tensor | None = None,
    cu_k: torch.Tensor | None = None,
    used_q: torch.Tensor | None = None,
    used_k: torch.Tensor | None = None,
    max_q: int | None = None,
    max_k: int | None = None,
    descales: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] = (None, None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward with what a slot gives it -> the output, in `place` if there is one, and the LSE.

    q, k, v     [B,Sq,H,D], [B,Sk,Hk,D], [B,Sk,Hk,Dv]; of documents [Tq,H,D], [Tk,Hk,D], [Tk,Hk,Dv]
    cu_*, max_* int32 [documents + 1] and the longest document
    used_*      int32 [B]: rows of each sample that count
    descales    float32 [B,Hk] of q, k and v, where these are e4m3

    What is called for every step of a model (`bound_dense`, `_Attention`) calls the operator itself.
    """
    left, right = sides(window)
    result, lse, _, _ = operator()(
        q, k, v, None, None, None, place, cu_q, cu_k, None, used_q, used_k, max_q, max_k, None, None, None, None, None,
        None, *descales, scale, causal, left, right, 0, softcap, False, None, splits, None, 0,
    )  # fmt: skip
    return result, lse


def sides(window: Window) -> tuple[int, int]:
    """A window as the operator has it: -1 is unbounded."""
    if window is None:
        return -1, -1
    left, right = window
    return -1 if left is None else left, -1 if right is None else right


@lru_cache(maxsize=1024)
def splits(q: tuple[int, ...], k: tuple[int, ...]) -> int:
    """1, unless the queries leave most of the device idle before many keys: then 0, the operator's own number."""
    batch, rows, heads, _ = q
    idle = batch * heads * -(-rows // _TILE) < _BUSY and k[1] >= _MANY_KEYS
    return 0 if BUILD.split and idle else 1


def placed(result: torch.Tensor, place: torch.Tensor | None, out: torch.Tensor | None) -> torch.Tensor:
    """The caller's buffer where there is one; the operator wrote it, or could not."""
    if out is None:
        return result
    return out if place is out else out.copy_(result)
