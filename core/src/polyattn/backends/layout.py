"""Tensors as kernels with 16-byte loads can walk them."""

from __future__ import annotations

from functools import lru_cache

import torch


@lru_cache(maxsize=1024)
def aligned(stride: tuple[int, ...], itemsize: int = 2) -> bool:
    """A dense last axis, and rows that begin at 16-byte boundaries where the tensor does."""
    width = 16 // itemsize
    return stride[-1] == 1 and all(step % width == 0 for step in stride[:-1])


def walkable(tensor: torch.Tensor) -> bool:
    """Whether every row begins at a 16-byte boundary of memory; another address can end the process's context."""
    itemsize = tensor.element_size()
    plain = type(tensor) is torch.Tensor  # others may have no address, only a place in their storage
    start = tensor.data_ptr() if plain else tensor.storage_offset() * itemsize
    return aligned(tensor.stride(), itemsize) and not start & 15


def reachable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself, or a row-major copy where its strides or address are out of a kernel's reach."""
    return tensor if walkable(tensor) else tensor.clone(memory_format=torch.contiguous_format)
