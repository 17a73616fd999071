"""Layouts of the ops: views [B,N,S,D] of a tensor, rows of documents, and outputs that start unwritten."""

from __future__ import annotations

from collections.abc import Sequence

import torch

#: Layout -> rank.
RANK = {"BSH": 3, "SBH": 3, "TND": 3, "NTD": 3, "BSND": 4, "BNSD": 4}
#: Layout -> the axis of its heads, where it has one.
HEAD_AXIS = {"BSND": 2, "BNSD": 1, "TND": 1, "NTD": 0}


def bnsd(layout: str, tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """A view [B,N,S,D]; a packed tensor is one batch row."""
    if layout == "BNSD":
        return tensor
    if layout == "BSND":
        return tensor.transpose(1, 2)
    if layout == "TND":
        return tensor.transpose(0, 1)[None]
    if layout == "NTD":
        return tensor[None]
    rows = tensor.unflatten(2, (heads, -1))
    return rows.transpose(1, 2) if layout == "BSH" else rows.permute(1, 2, 0, 3)


def unwritten(layout: str, batch: int, heads: int, length: int, dim: int, like: torch.Tensor) -> torch.Tensor:
    """An output in `layout` full of NaN, of the dtype of `like`."""
    shape = {
        "BNSD": (batch, heads, length, dim),
        "BSND": (batch, length, heads, dim),
        "TND": (length, heads, dim),
        "NTD": (heads, length, dim),
        "BSH": (batch, length, heads * dim),
        "SBH": (length, batch, heads * dim),
    }[layout]
    return torch.full(shape, float("nan"), dtype=like.dtype)


def lengths_of(ends: Sequence[int]) -> list[int]:
    """Lengths from cumulative ends without a leading zero; a decrease is a length of 0."""
    starts = [0, *ends[:-1]]
    return [max(end - start, 0) for start, end in zip(starts, ends, strict=True)]


def slices_of(lengths: Sequence[int]) -> list[slice]:
    """Rows of each document, one after another."""
    start, slices = 0, []
    for length in lengths:
        slices.append(slice(start, start + length))
        start += length
    return slices
