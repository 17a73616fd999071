"""Rows between padded batches [B,S,H,D] and packed documents [n,H,D]: gathered, scattered back, cleared behind an end.

`pack`, `unpack` and `clear` are what `polyattn.backends.row_ops` states, a launch each. Tensors may have any strides;
B*S is below 2**31.
"""

from __future__ import annotations

from typing import Any

import torch

from polyattn.backends.calls import Result, wants_grad
from polyattn.kernels import row_tiles
from polyattn.kernels.launch import launch
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
    return _unpacked(rows, lse, places_of(index, batch * length), out, batch, length, prefix=False)


def unpack_prefix(
    rows: torch.Tensor,
    lse: torch.Tensor | None,
    boundaries: torch.Tensor,
    out: torch.Tensor | None,
    batch: int,
    length: int,
) -> Result:
    """`unpack` where sample b keeps a prefix, packed rows boundaries[b] to boundaries[b+1] ([B+1] on the device).

    No index is needed, and the boundaries may change between replays of a graph. Not differentiable.
    """
    return _unpacked(rows, lse, boundaries, out, batch, length, prefix=True)


def clear(out: torch.Tensor, lse: torch.Tensor | None, used: torch.Tensor) -> None:
    """Rows from used[b] on (int32 [B], on the device) of out [B,S,H,D] become 0, of lse [B,H,S] -inf; in place."""
    if out.numel() == 0:
        return
    batch, length, heads, dim = out.shape
    width = heads * dim
    cut = row_tiles.cut(width, out.element_size())
    out_batch, out_row, out_head, out_dim = out.stride()
    lse_strides = (0, 0, 0) if lse is None else lse.stride()
    launch(
        clear_kernel, (row_tiles.clearing_programs(cut.tiles(length), batch), batch), out.device,
        used, used.stride(0), length, out, out_batch, out_row, out_head, out_dim, lse, *lse_strides,
        width, width if out_dim == 1 and out_head == dim else dim, cut.columns, cut.tile, heads, row_tiles.LSE_ROWS,
        num_warps=row_tiles.WARPS,
    )  # fmt: skip


def blank(out: torch.Tensor, lse: torch.Tensor | None, keep: torch.Tensor) -> None:
    """Rows of out [B,S,H,D] that keep (bool [B,S], on the device) does not name become 0, of lse [B,H,S] -inf."""
    if out.numel() == 0:
        return
    batch, length, heads, dim = out.shape
    width = heads * dim
    out_batch, out_row, out_head, out_dim = out.stride()
    lse_strides = (0, 0, 0) if lse is None else lse.stride()
    launch(
        blank_kernel, (-(-length // row_tiles.BLANK_ROWS), batch), out.device,
        keep.contiguous().view(torch.uint8), length, out, out_batch, out_row, out_head, out_dim, lse, *lse_strides,
        width, width if out_dim == 1 and out_head == dim else dim, row_tiles.BLANK_COLUMNS, heads,
        row_tiles.BLANK_ROWS, num_warps=4,
    )  # fmt: skip


def _packed(tensors: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    if not 1 <= len(tensors) <= 3:
        raise ValueError(f"tensors: one to three are packed at once, got {len(tensors)}")
    batch, length = tensors[0].shape[:2]
    kept, total = index.shape[0], batch * length
    packed = tuple(t.new_empty(kept, *t.shape[2:]) for t in tensors)
    if kept == 0 or total == 0:
        return tuple(rows.zero_() for rows in packed)
    itemsize, tile, programs = tensors[0].element_size(), 0, 0
    given: list[Any] = []
    cuts: list[int] = []
    for tensor, rows in zip(tensors, packed, strict=True):
        source = _dense_dim(tensor)
        _, _, heads, dim = source.shape
        batch_stride, row_stride, head_stride, _ = source.stride()
        columns, _, _, tile = cut = row_tiles.cut(heads * dim, itemsize)
        given += (source, rows, batch_stride, row_stride, head_stride)
        cuts += (heads * dim, heads * dim if head_stride == dim else dim, columns)
        programs += cut.tiles(kept)
    absent = 3 - len(tensors)
    launch(
        pack_kernel, (programs,), index.device,
        index, kept, length, total, *given, *_ABSENT * absent, *cuts, *_NO_CUTS * absent, tile,
        num_warps=row_tiles.WARPS,
    )  # fmt: skip
    return packed


#: A tensor that is not there, and how it is cut.
_ABSENT = (None, None, 0, 0, 0)
_NO_CUTS = (1, 1, 1)


def _unpacked(
    rows: torch.Tensor,
    lse: torch.Tensor | None,
    place: torch.Tensor,
    out: torch.Tensor | None,
    batch: int,
    length: int,
    *,
    prefix: bool,
) -> Result:
    kept, heads, dim = rows.shape
    result = rows.new_empty(batch, length, heads, dim) if out is None or (out.stride(3) != 1 and dim > 1) else out
    spread = None if lse is None else lse.new_empty(batch, heads, length)
    if result.numel() > 0:
        rows = rows.contiguous()
        lse = lse if lse is None or lse.stride(1) == 1 else lse.contiguous()
        total, width = batch * length, heads * dim
        cut = row_tiles.cut(width, rows.element_size())
        programs = cut.tiles(total)
        if lse is not None:
            programs += -(-total // row_tiles.LSE_ROWS) * heads
        out_batch, out_row, out_head, _ = result.stride()
        launch(
            unpack_kernel, (programs,), rows.device,
            place, kept, length, total, rows, result, out_batch, out_row, out_head,
            lse, 0 if lse is None else lse.stride(0), spread,
            width, width if out_head == dim else dim, cut.columns, cut.tile, heads, row_tiles.LSE_ROWS, prefix,
            num_warps=row_tiles.WARPS,
        )  # fmt: skip
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
        return _unpacked(rows, lse, places_of(index, batch * length), None, batch, length, prefix=False)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        rows = None if grad is None else pack((grad,), ctx.index)[0]
        lse = None if grad_lse is None else pack((grad_lse.transpose(1, 2).unsqueeze(3),), ctx.index)[0]
        return rows, None if lse is None else lse.squeeze(2).transpose(0, 1), None, None, None
