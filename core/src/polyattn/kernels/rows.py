"""Rows between padded batches [B,S,H,D] and packed documents [n,H,D]: gathered, scattered back, cleared behind an end.

`pack`, `unpack` and `clear` are what `polyattn.backends.row_ops` states, a launch each. Tensors may have any strides;
B*S is below 2**31.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from polyattn.backends.calls import Result, wants_grad
from polyattn.kernels import row_tiles
from polyattn.kernels.launch import Prepared, launch_prepared, prepare
from polyattn.kernels.row_kernels import blank_kernel, clear_kernel, pack_kernel, unpack_kernel
from polyattn.kernels.row_places import places_of


def pack(tensors: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rows `index` [n] (int64 or int32, flat b*S + s) of one to three tensors [B,S,H*,D*] -> [n,H*,D*] of each.

    All have the same B, S and item size. Positions outside of [0, B*S) give zeros. Differentiable, for positions that
    each occur once.
    """
    if wants_grad(*tensors):
        packed: tuple[torch.Tensor, ...] = _Pack.apply(index, *tensors)  # type: ignore[no-untyped-call]
        return packed
    return _packed(tensors, index)


def unpack(
    rows: torch.Tensor,
    lse: torch.Tensor | None,
    index: torch.Tensor,
    out: torch.Tensor | None,
    batch: int,
    length: int,
) -> Result:
    """rows [n,H,D] (and lse float32 [H,n]) to the positions `index` [n] of [B,S,H,D] (and [B,H,S]).

    Rows that no position names are 0, their LSE -inf; positions outside of [0, B*S) are dropped. `out` is written and
    returned where given; else the result is differentiable. The inverse of `index` is remembered while it lives.
    """
    if out is None and wants_grad(*((rows,) if lse is None else (rows, lse))):
        spread: Result = _Unpack.apply(rows, lse, index, batch, length)  # type: ignore[no-untyped-call]
        return spread
    return _unpacked(rows, lse, places_of(index, batch * length), out, batch, length)


def clear(out: torch.Tensor, lse: torch.Tensor | None, used: torch.Tensor) -> None:
    """Rows from used[b] on (int32 [B], on the device) of out [B,S,H,D] become 0, of lse [B,H,S] -inf; in place."""
    if out.numel() == 0:
        return
    lse_strides = _NO_LSE if lse is None else lse.stride()
    clearing, grid = _clearing(out.shape, out.stride(), out.element_size(), lse_strides, used.stride(0))
    launch_prepared(clearing, grid, out.device, used, out, lse)


def blank(out: torch.Tensor, lse: torch.Tensor | None, keep: torch.Tensor) -> None:
    """Rows of out [B,S,H,D] that keep (bool [B,S], on the device) does not name become 0, of lse [B,H,S] -inf."""
    if out.numel() == 0:
        return
    blanking, grid = _blanking(out.shape, out.stride(), _NO_LSE if lse is None else lse.stride())
    launch_prepared(blanking, grid, out.device, keep.contiguous().view(torch.uint8), out, lse)


# A launch but for its tensors, and its grid, follow from shapes and strides: they are made once for each.

_NO_LSE = (0, 0, 0)
_Layout = tuple[torch.Size, tuple[int, ...]]
_Launch = tuple[Prepared, tuple[int, ...]]


@lru_cache(maxsize=1024)
def _packing(kept: int, itemsize: int, *layouts: _Layout) -> _Launch:
    """For `kept` rows of one to three tensors [B,S,H*,D*], whose last axes are dense."""
    batch, length = layouts[0][0][:2]
    tile, programs = row_tiles.tile_of(itemsize), 0
    strides: list[int] = []
    cuts: dict[str, int] = {}
    for name, ((_, _, heads, dim), (batch_stride, row_stride, head_stride, _)) in zip("ABC", layouts, strict=False):
        width = heads * dim
        cut = row_tiles.cut(width, itemsize)
        programs += cut.tiles(kept)
        strides += (batch_stride, row_stride, head_stride)
        segment = width if head_stride == dim else dim
        cuts |= {f"{name}_WIDTH": width, f"{name}_SEGMENT": segment, f"{name}_COLUMNS": cut.columns}
    for name in "ABC"[len(layouts) :]:
        strides += (0, 0, 0)
        cuts |= {f"{name}_WIDTH": 1, f"{name}_SEGMENT": 1, f"{name}_COLUMNS": 1}
    numbers = (kept, length, batch * length, *strides)
    packing = prepare(pack_kernel, *numbers, TILE=tile, num_warps=row_tiles.WARPS, **cuts)
    return packing, (programs,)


@lru_cache(maxsize=1024)
def _unpacking(
    kept: int, out: torch.Size, out_strides: tuple[int, ...], itemsize: int, lse_head: int | None
) -> _Launch:
    """For `kept` rows to `out` [B,S,H,D], whose last axis is dense; lse_head: the stride of heads, None without LSE."""
    batch, length, heads, dim = out
    total, width, out_head = batch * length, heads * dim, out_strides[2]
    cut = row_tiles.cut(width, itemsize)
    programs = cut.tiles(total)
    if lse_head is not None:
        programs += -(-total // row_tiles.LSE_ROWS) * heads
    unpacking = prepare(
        unpack_kernel, kept, length, total, *out_strides[:3], lse_head or 0,
        WIDTH=width, SEGMENT=width if out_head == dim else dim, COLUMNS=cut.columns, TILE=cut.tile,
        HEADS=heads, LSE_ROWS=row_tiles.LSE_ROWS, num_warps=row_tiles.WARPS,
    )  # fmt: skip
    return unpacking, (programs,)


@lru_cache(maxsize=1024)
def _clearing(
    out: torch.Size, out_strides: tuple[int, ...], itemsize: int, lse_strides: tuple[int, ...], used_step: int
) -> _Launch:
    batch, length, heads, dim = out
    cut = row_tiles.cut(heads * dim, itemsize)
    segment, *steps = _segments(heads, dim, *out_strides[2:])
    clearing = prepare(
        clear_kernel, used_step, length, *out_strides[:2], *steps, *lse_strides,
        WIDTH=heads * dim, SEGMENT=segment, COLUMNS=cut.columns, TILE=cut.tile,
        HEADS=heads, LSE_ROWS=row_tiles.LSE_ROWS, num_warps=row_tiles.WARPS,
    )  # fmt: skip
    return clearing, (batch, row_tiles.clearing_programs(cut.tiles(length), batch))


@lru_cache(maxsize=1024)
def _blanking(out: torch.Size, out_strides: tuple[int, ...], lse_strides: tuple[int, ...]) -> _Launch:
    batch, length, heads, dim = out
    segment, *steps = _segments(heads, dim, *out_strides[2:])
    blanking = prepare(
        blank_kernel, length, *out_strides[:2], *steps, *lse_strides,
        WIDTH=heads * dim, SEGMENT=segment, COLUMNS=row_tiles.BLANK_COLUMNS,
        HEADS=heads, ROWS=row_tiles.BLANK_ROWS, num_warps=row_tiles.BLANK_WARPS,
    )  # fmt: skip
    return blanking, (batch * -(-length // row_tiles.BLANK_ROWS),)


def _segments(heads: int, dim: int, head_step: int, step: int) -> tuple[int, int, int]:
    """A row [H,D] as equal segments: elements of one, the step from one to the next, and the step inside of one.

    There is one segment only where all of the row lies side by side.
    """
    if heads == 1:  # each element is a segment of its own
        heads, dim, head_step = dim, 1, step
    step = 1 if dim == 1 else step
    return (heads * dim if step == 1 and head_step == dim else dim), head_step, step


def _packed(tensors: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not 1 <= len(tensors) <= 3:
        raise ValueError(f"tensors: one to three are packed at once, got {len(tensors)}")
    batch, length = tensors[0].shape[:2]
    kept = index.shape[0]
    packed = tuple(t.new_empty(kept, *t.shape[2:]) for t in tensors)
    if kept == 0 or batch == 0 or length == 0:
        return tuple(rows.zero_() for rows in packed)
    sources = [_dense_dim(tensor) for tensor in tensors]
    index = index.contiguous()
    packing, grid = _packing(kept, sources[0].element_size(), *((s.shape, s.stride()) for s in sources))
    moved = [tensor for pair in zip(sources, packed, strict=True) for tensor in pair]
    launch_prepared(packing, grid, index.device, index, *moved, *(None,) * (6 - len(moved)))
    return packed


def _unpacked(
    rows: torch.Tensor,
    lse: torch.Tensor | None,
    place: torch.Tensor,
    out: torch.Tensor | None,
    batch: int,
    length: int,
) -> Result:
    kept, heads, dim = rows.shape
    result = rows.new_empty(batch, length, heads, dim) if out is None or (out.stride(3) != 1 and dim > 1) else out
    spread = None if lse is None else lse.new_empty(batch, heads, length)
    if result.numel() > 0:
        rows = rows.contiguous()
        lse = lse if lse is None or lse.stride(1) == 1 else lse.contiguous()
        lse_head = None if lse is None else lse.stride(0)
        unpacking, grid = _unpacking(kept, result.shape, result.stride(), rows.element_size(), lse_head)
        launch_prepared(unpacking, grid, rows.device, place, rows, result, lse, spread)
    return (result if out is None or result is out else out.copy_(result)), spread


def _dense_dim(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, copied where its last axis is not dense."""
    return tensor if tensor.stride(3) == 1 or tensor.shape[3] == 1 else tensor.contiguous()


class _Pack(torch.autograd.Function):
    """The gradient of gathered rows goes back to their positions; nothing reached the others."""

    @staticmethod
    def forward(ctx: Any, index: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.index, ctx.layout = index, tensors[0].shape[:2]
        packed = _packed(tensors, index)
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(rows for rows, needs in zip(packed, needed, strict=True) if not needs))
        return packed

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        return None, *(
            unpack(grad, None, ctx.index, None, *ctx.layout)[0] if needs else None
            for grad, needs in zip(grads, needed, strict=True)
        )


class _Unpack(torch.autograd.Function):
    """The gradient of scattered rows is gathered from their positions, and so is that of their LSE."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, lse: torch.Tensor | None, index: torch.Tensor, batch: int, length: int
    ) -> Result:
        ctx.index = index
        ctx.set_materialize_grads(False)
        return _unpacked(rows, lse, places_of(index, batch * length), None, batch, length)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        rows = None if grad is None else pack((grad,), ctx.index)[0]
        lse = None if grad_lse is None else pack((grad_lse.transpose(1, 2).unsqueeze(3),), ctx.index)[0]
        return rows, None if lse is None else lse.squeeze(2).transpose(0, 1), None, None, None
