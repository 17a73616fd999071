"""The structures that every test of a call's surroundings is tried with, at a size of several tiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import DEVICE, qkv


class Made(NamedTuple):
    """Tensors and keyword arguments of one call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    given: dict[str, Any]

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v


def _dense(dtype: torch.dtype, seed: int) -> Made:
    return Made(*qkv((2, 300), (2, 430), heads=8, kv_heads=2, dtype=dtype, seed=seed), {"causal": True})


def _key_padding(dtype: torch.dtype, seed: int) -> Made:
    padding = pa.KeyPadding.from_lengths([300, 177], 300)
    return Made(*qkv((2, 300), dtype=dtype, seed=seed), {"structure": padding})


def _key_padding_holes(dtype: torch.dtype, seed: int) -> Made:
    padding = pa.KeyPadding.from_ranges([[(0, 90), (130, 300)], [(5, 177)]], 300)
    return Made(*qkv((2, 300), dtype=dtype, seed=seed), {"structure": padding})


def _key_padding_on_device(dtype: torch.dtype, seed: int) -> Made:
    padding = pa.KeyPadding.from_lengths(torch.tensor([300, 177], device=DEVICE), 300)
    return Made(*qkv((2, 300), dtype=dtype, seed=seed), {"structure": padding})


def _mask(dtype: torch.dtype, seed: int) -> Made:
    seen = torch.rand(2, 1, 300, 290, generator=torch.Generator().manual_seed(seed)) < 0.7
    seen[..., 0] = True
    return Made(*qkv((2, 300), (2, 290), dtype=dtype, seed=seed), {"structure": pa.Mask(seen.to(DEVICE))})


def _packed(dtype: torch.dtype, seed: int) -> Made:
    documents = pa.Packed.from_lengths([200, 3, 0, 300])
    return Made(*qkv((520,), dtype=dtype, seed=seed), {"structure": documents})


def _packed_on_device(dtype: torch.dtype, seed: int) -> Made:
    boundaries = torch.tensor([0, 200, 203, 503], dtype=torch.int32, device=DEVICE)
    documents = pa.Packed.from_cu_seqlens(boundaries, max_q=300)
    return Made(*qkv((520,), dtype=dtype, seed=seed), {"structure": documents, "causal": True})


def _spans(dtype: torch.dtype, seed: int) -> Made:
    spans = pa.Spans([[(100, 250)], [(30, 100), (200, 300)]])
    return Made(*qkv((2, 300), dtype=dtype, seed=seed), {"structure": spans})


def _paged(dtype: torch.dtype, seed: int) -> Made:
    pages = pa.Paged([[4, 1, 6], [2, 0, -1]], [140, 70])
    return Made(*qkv((2, 40), (8, 64), kv_heads=2, dtype=dtype, seed=seed), {"structure": pages, "causal": True})


def _paged_on_device(dtype: torch.dtype, seed: int) -> Made:
    table = torch.tensor([[4, 1, 6], [2, 0, -1]], dtype=torch.int32, device=DEVICE)
    pages = pa.Paged(table, torch.tensor([140, 70], dtype=torch.int32, device=DEVICE))
    return Made(*qkv((2, 40), (8, 64), kv_heads=2, dtype=dtype, seed=seed), {"structure": pages, "causal": True})


STRUCTURES: dict[str, Callable[[torch.dtype, int], Made]] = {
    "dense": _dense,
    "key_padding": _key_padding,
    "key_padding_holes": _key_padding_holes,
    "key_padding_on_device": _key_padding_on_device,
    "mask": _mask,
    "packed": _packed,
    "packed_on_device": _packed_on_device,
    "spans": _spans,
    "paged": _paged,
    "paged_on_device": _paged_on_device,
}
every_structure = pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
