"""Tensors as kernels with 16-byte loads can walk them."""

from __future__ import annotations

import torch


def walkable(tensor: torch.Tensor) -> bool:
    """Whether the last axis is dense and every row begins at a 16-byte boundary."""
    *steps, last = tensor.stride()
    if last != 1 and tensor.shape[-1] != 1:
        return False
    width = 16 // tensor.element_size()
    return all(start % width == 0 for start in (tensor.storage_offset(), *steps))


def reachable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a row-major copy where its strides are out of a kernel's reach."""
    return tensor if walkable(tensor) else tensor.clone(memory_format=torch.contiguous_format)
