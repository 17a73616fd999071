"""Documents kept apart although a kernel's last tile of one holds the first keys of the next, counted 0 times.

0 times NaN is NaN. So the kernel sees 0 in the place of what is not finite, and every document gets back its own.
"""

from __future__ import annotations

from typing import Any

import torch

from polyattn.vendor import varlen

Result = tuple[torch.Tensor, torch.Tensor | None]

#: Keys of a tile.
TILE = 64


def in_tiles(lengths: tuple[int, ...] | None) -> bool:
    """Whether the host knows that each document ends with a tile, the last one with the tensor."""
    return lengths is not None and all(length % TILE == 0 for length in lengths[:-1])


def apart(
    kernel: varlen.VarlenKernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    **call: Any,
) -> Result:
    """The kernel on finite values; then NaN and infinity reach all rows of their document, as a sum over it."""
    finite = v.isfinite()
    result, lse = kernel(q, k, v.where(finite, 0.0), out, cu_q=cu_q, cu_k=cu_k, **call)
    sums = v.new_zeros(cu_k.shape[0], *v.shape[1:])  # the last is of rows that no document has
    sums.index_add_(0, _documents(cu_k, v.shape[0]), v.masked_fill(finite, 0.0))
    sums[-1] = 0.0
    theirs = sums.index_select(0, _documents(cu_q, q.shape[0]))
    return result.add_(theirs.repeat_interleave(q.shape[1] // v.shape[1], dim=1)), lse


def _documents(cu: torch.Tensor, rows: int) -> torch.Tensor:
    """The document of each row, int64 [rows]; their number for rows past the last boundary."""
    ends = cu.narrow(0, 1, cu.shape[0] - 1).to(torch.int64)
    return torch.searchsorted(ends, torch.arange(rows, device=cu.device), right=True)
