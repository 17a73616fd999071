"""Moving token rows between padded batches and packed documents: what a vendor must give, and torch's own way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from polyattn.backends.calls import Result

#: tensors [B,S,H,D] (any strides, each its own H and D), index [n] (flat positions b*S+s) -> rows [n,H,D] of each.
#: A position past the last row gives zeros. Differentiable.
Pack = Callable[[tuple[torch.Tensor, ...], torch.Tensor], tuple[torch.Tensor, ...]]

#: rows [n,H,D], lse [H,n] | None, index [n], out [B,S,H,D] | None, B, S -> out [B,S,H,D], lse [B,H,S] | None.
#: Positions that no row has are 0, their LSE -inf; rows whose position is past the last are dropped. Differentiable
#: where `out` is None.
Unpack = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None, int, int], Result]

#: out [B,S,H,D], lse [B,H,S] | None, used [B] int32 on the device: rows from used[b] on become 0, their LSE -inf.
Clear = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]

#: out [B,S,H,D], lse [B,H,S] | None, keep [B,S] bool on the device: rows that are not kept become 0, their LSE -inf.
Blank = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor], None]


class RowOps(NamedTuple):
    """The four movements, by whatever moves rows fastest on a platform.

    few   padded rows of a sample, on the average, up to which its queries stay where they are: computing so many for
          nothing takes the device no longer than moving all rows to the kernel and back. 0: not known, they are moved
    """

    pack: Pack
    unpack: Unpack
    clear: Clear
    blank: Blank
    few: int = 0


def _pack(tensors: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    rows = tensors[0].shape[0] * tensors[0].shape[1]
    inside = index.clamp(max=rows - 1)
    beyond = (index >= rows).reshape(-1, 1, 1)
    return tuple(t.flatten(0, 1).index_select(0, inside).masked_fill(beyond, 0.0) for t in tensors)


def _unpack(
    rows: torch.Tensor,
    lse: torch.Tensor | None,
    index: torch.Tensor,
    out: torch.Tensor | None,
    batch: int,
    length: int,
) -> Result:
    total = batch * length
    inside = index.clamp(max=total)  # one spare row takes what is dropped
    spread = rows.new_zeros(total + 1, *rows.shape[1:]).index_copy(0, inside, rows)
    result = spread.narrow(0, 0, total).unflatten(0, (batch, length))
    if lse is not None:
        blank = lse.new_full((lse.shape[0], total + 1), float("-inf")).index_copy(1, inside, lse)
        lse = blank.narrow(1, 0, total).unflatten(1, (batch, length)).transpose(0, 1)
    return (result if out is None else out.copy_(result)), lse


def _clear(out: torch.Tensor, lse: torch.Tensor | None, used: torch.Tensor) -> None:
    _blank(out, lse, torch.arange(out.shape[1], device=out.device) < used.unsqueeze(1))


def _blank(out: torch.Tensor, lse: torch.Tensor | None, keep: torch.Tensor) -> None:
    hidden = keep.logical_not()
    out.masked_fill_(hidden.unsqueeze(-1).unsqueeze(-1), 0.0)
    if lse is not None:
        lse.masked_fill_(hidden.unsqueeze(1), float("-inf"))


#: torch's own operators: right on every device.
TORCH_ROWS = RowOps(_pack, _unpack, _clear, _blank)


def _triton_pack(tensors: tuple[torch.Tensor, ...], index: torch.Tensor) -> tuple[torch.Tensor, ...]:
    from polyattn.kernels import rows  # triton is imported where a slot first needs it

    return rows.pack(tensors, index)


def _triton_unpack(
    packed: torch.Tensor,
    lse: torch.Tensor | None,
    index: torch.Tensor,
    out: torch.Tensor | None,
    batch: int,
    length: int,
) -> Result:
    from polyattn.kernels import rows

    return rows.unpack(packed, lse, index, out, batch, length)


def _triton_clear(out: torch.Tensor, lse: torch.Tensor | None, used: torch.Tensor) -> None:
    from polyattn.kernels import rows

    rows.clear(out, lse, used)


def _triton_blank(out: torch.Tensor, lse: torch.Tensor | None, keep: torch.Tensor) -> None:
    from polyattn.kernels import rows

    rows.blank(out, lse, keep)


#: One launch each, for devices that Triton serves.
TRITON_ROWS = RowOps(_triton_pack, _triton_unpack, _triton_clear, _triton_blank)
