"""Exact attention by the flash kernel, torch in and torch out: padded batches, packed documents, spans.

Forward only; float16, bfloat16 and float32; head dims up to 512, each its own for keys and values. Every row of the
output is written, once: a row that sees no key, or is not asked, is 0 and its LSE (float32, natural log) -inf. What no
row of the call sees may hold anything.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import NamedTuple

import torch

from polyattn.backends.calls import Result
from polyattn.kernels.flash_kernel import attend_kernel, marked_kernel
from polyattn.kernels.launch import Prepared, Repeated, architecture_of, launch_prepared, prepare, repeat
from polyattn.kernels.score_factors import score_factors
from polyattn.kernels.tiles import BOUNDED_PROGRAMS, chunks, tile_for

Window = tuple[int | None, int | None] | None

#: Bytes that one instruction moves, if addresses are multiples of it.
_VECTOR = 16
#: Columns of a row, and the first offset that 32 bits do not hold.
_WIDEST, _INT32 = 512, 1 << 31

#: Of the kernel's tensors, those behind the output: LSE, boundaries, and what says who sees whom.
_ABSENT = 8


class Visibility(NamedTuple):
    """Who sees whom beside causal and window; None says nothing. Tensors are on the device, int32 where not bool.

    used_q, used_k  how many of a sample's first rows are asked, of its first keys seen: [B], or one number for all
    keep, keep_q    kept keys bool [B,Sk], asked rows bool [B,Sq]
    ends            [B,Sq], packed [T]: a row sees the rows of k before this one
    only_if         [B], packed [documents]: where it is 0, nothing is computed and nothing written
    """

    used_q: torch.Tensor | int | None = None
    used_k: torch.Tensor | int | None = None
    keep: torch.Tensor | None = None
    keep_q: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    only_if: torch.Tensor | None = None


class Scoring(NamedTuple):
    """How scores are made and which positions may meet, as a slot gets it."""

    causal: bool
    scale: float
    window: Window
    softcap: float


ALL = Visibility()


def batched(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    scoring: Scoring,
    visibility: Visibility = ALL,
    *,
    need_lse: bool,
    lse: torch.Tensor | None = None,
) -> Result:
    """q [B,Sq,H,D], k [B,Sk,Hk,D], v [B,Sk,Hk,Dv] -> out [B,Sq,H,Dv], lse [B,H,Sq] or None.

    Causal and the window are aligned bottom-right in the tensors, whatever `visibility` hides. `lse`: where to write
    it, contiguous. Samples that `visibility.only_if` does not mark keep what `out` and `lse` hold.
    """
    samples, rows, heads, _ = q.shape
    if need_lse and lse is None:
        lse = torch.empty(samples, heads, rows, dtype=torch.float32, device=q.device)
    return _attend(
        q, k, v, out, lse if need_lse else None, scoring, visibility,
        cu_q=None, cu_k=None, documents=samples, longest=rows, shift=k.shape[1] - rows,
    )  # fmt: skip


def batched_launch(
    device: torch.device,
    element_size: int,
    shapes: tuple[torch.Size, torch.Size],
    strides: tuple[tuple[int, ...], ...],
    scoring: Scoring,
    keys: int,
    *,
    need_lse: bool,
) -> Repeated:
    """`batched` without visibility for one layout: launched with q, k, v, the output, and the LSE where it is needed.

    `shapes` are q's and v's; `strides` those of q, k, v and the output, all 1 along the last axis.
    """
    samples, rows = shapes[0][:2]
    plan = _plan(
        device, element_size, *shapes, strides, scoring, None, None, False, False, samples, rows, keys - rows
    )  # fmt: skip
    return repeat(plan.attend, (plan.programs,), device, absent=_ABSENT - need_lse)


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    scoring: Scoring,
    visibility: Visibility = ALL,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    max_q: int,
    need_lse: bool,
    lse: torch.Tensor | None = None,
) -> Result:
    """q [T,H,D], k [Tk,Hk,D], v [Tk,Hk,Dv] -> out [T,H,Dv], lse [H,T] or None, in documents that do not see each other.

    cu_q, cu_k are int32 [documents + 1] on the device, max_q at least the longest document's query rows. Causal and the
    window are aligned bottom-right in each document. Rows past cu_q[-1] become 0, unless `visibility.only_if` is given.
    """
    if need_lse and lse is None:
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    result, lse = _attend(
        q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), None if out is None else out.unsqueeze(0),
        lse if need_lse else None, scoring, visibility,
        cu_q=cu_q, cu_k=cu_k, documents=cu_q.shape[0] - 1, longest=max_q, shift=0,
    )  # fmt: skip
    return result.squeeze(0) if out is None else out, lse


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    scoring: Scoring,
    visibility: Visibility,
    *,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    documents: int,
    longest: int,
    shift: int,
) -> Result:
    """One launch; packed tensors have a leading axis of 1."""
    target = out
    if out is None or out.stride(3) != 1:
        marked = visibility.only_if is not None and out is not None
        target = out.contiguous() if marked else q.new_empty(*q.shape[:3], v.shape[3])  # type: ignore[union-attr]
    assert target is not None
    q, k, v = _last_axis_dense(q), _last_axis_dense(k), _last_axis_dense(v)
    used_q, used_k = visibility.used_q, visibility.used_k
    whole = (used_q if isinstance(used_q, int) else None, used_k if isinstance(used_k, int) else None)
    plan = _plan(
        q.device, q.element_size(), q.shape, v.shape, (q.stride(), k.stride(), v.stride(), target.stride()), scoring,
        *whole, visibility.ends is not None, cu_q is not None, documents, longest, shift,
    )  # fmt: skip
    tensors = (
        q, k, v, target, lse, _contiguous(cu_q), _contiguous(cu_k),
        _contiguous(None if isinstance(used_q, int) else used_q),
        _contiguous(None if isinstance(used_k, int) else used_k),
        _contiguous(visibility.keep), _contiguous(visibility.keep_q), _contiguous(visibility.ends),
    )  # fmt: skip
    if visibility.only_if is None:
        launch_prepared(plan.attend, (plan.programs,), q.device, *tensors)
    else:
        programs = min(plan.programs, BOUNDED_PROGRAMS)
        launch_prepared(plan.attend_marked, (programs,), q.device, *tensors, visibility.only_if.contiguous())
    if out is not None and target is not out:
        target = out.copy_(target)
    return target, lse


class _Plan(NamedTuple):
    """Both kernels' launch but for its tensors, and the programs that all tiles need."""

    programs: int
    attend: Prepared
    attend_marked: Prepared


@lru_cache(maxsize=1024)
def _plan(
    device: torch.device,
    element_size: int,
    q_shape: torch.Size,
    v_shape: torch.Size,
    strides: tuple[tuple[int, ...], ...],
    scoring: Scoring,
    used_q: int | None,
    used_k: int | None,
    has_ends: bool,
    is_packed: bool,
    documents: int,
    longest: int,
    shift: int,
) -> _Plan:
    _, rows_q, heads, head_dim = q_shape
    _, rows_k, kv_heads, v_head_dim = v_shape
    tile = tile_for(architecture_of(device), head_dim, v_head_dim, element_size)
    keys, values = chunks(head_dim), chunks(v_head_dim)
    # a stride is passed in units that all of them are multiples of, so that the compiler knows it of the addresses
    batches = [0 if q_shape[0] == 1 else stride[0] for stride in strides]
    common = gcd(*batches, *(step for stride in strides for step in stride[1:3]))
    unit = min(common & -common or _VECTOR, _VECTOR // element_size)
    steps = [
        step // unit
        for batch, stride in zip(batches, strides, strict=True)
        for step in (batch, stride[1], stride[2])
    ]  # fmt: skip
    farthest = max(stride[1] for stride in strides) * max(tile.block_m, tile.block_n)
    left, right = (None, None) if scoring.window is None or has_ends else scoring.window
    if scoring.causal and not has_ends:
        right = 0
    blocks = max(1, -(-longest // tile.block_m))
    # the factor behind the row's maximum must be positive, and leave -inf alone: the sign is that of q
    sign = 0.0 if scoring.scale == 0.0 else 1.0 if scoring.scale > 0.0 else -1.0
    inner, outer, capped, fused = score_factors(abs(scoring.scale) or 1.0, scoring.softcap, element_size)
    numbers = (
        *steps, rows_q, rows_q, rows_k,
        rows_k if used_k is None else min(used_k, rows_k), rows_q if used_q is None else min(used_q, rows_q),
        shift, left or 0, right or 0, heads, heads // kv_heads, inner, outer, documents, blocks,
    )  # fmt: skip
    switches = {
        "D": head_dim, "D0": keys.first, "D1": keys.second, "V": v_head_dim, "V0": values.first, "V1": values.second,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "LEFT": left is not None, "RIGHT": right is not None,
        "CAPPED": capped, "UNIT": unit, "WIDE": farthest + _WIDEST >= _INT32, "SIGN": sign,
        "num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": fused,
    }  # fmt: skip
    programs = blocks * heads * (documents + is_packed)  # what lies behind all documents is one more
    attend, marked = (prepare(kernel, *numbers, **switches) for kernel in (attend_kernel, marked_kernel))
    return _Plan(programs, attend, marked)


def _last_axis_dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(3) == 1 else tensor.contiguous()


def _contiguous(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()
