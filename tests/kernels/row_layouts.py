"""Rows of a padded batch laid out in memory as callers have them, with NaN between them."""

from __future__ import annotations

import math

import torch

LAYOUTS = ["contiguous", "heads first", "fused", "sliced", "dims apart"]
#: (heads, head dim). Rows of one head, of one column: all that lies between their elements is the caller's.
NARROW = [(1, 16), (1, 1), (3, 1)]


def random(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape))).to(device, dtype)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same [B,S,H,D] with other strides; what lies between its rows is NaN."""
    batch, length, heads, dim = tensor.shape
    if layout == "heads first":
        return tensor.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "fused":
        whole = tensor.new_full((batch, length, 3, heads, dim), math.nan)
        whole[:, :, 1] = tensor
        return whole[:, :, 1]
    if layout == "sliced":
        whole = tensor.new_full((batch, length + 3, heads + 1, dim + 2), math.nan)
        whole[:, 2:-1, 1:, :-2] = tensor
        return whole[:, 2:-1, 1:, :-2]
    if layout == "dims apart":
        return tensor.transpose(2, 3).contiguous().transpose(2, 3)
    return tensor


def every_second(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same [B,S,H,D] with steps of 2 in its last axis, and all of its memory, NaN in between."""
    memory = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), math.nan)
    memory[..., ::2] = tensor
    return memory[..., ::2], memory
