"""BlockMap: arbitrary block sparsity, as lists of kept key blocks per query block."""

from __future__ import annotations

from typing import ClassVar

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure


class BlockMap(Structure):
    """Query block i of head h sees key blocks `lists[b,h,i,:counts[b,h,i]]`.

    lists [B|1,H|1,Nq,K] and counts [B|1,H|1,Nq] are integers; `sizes` [Nk] gives the real rows of each key block.

    >>> import torch, polyattn as pa
    >>> pa.BlockMap(torch.zeros(1, 1, 2, 1, dtype=torch.int32), torch.ones(1, 1, 2, dtype=torch.int32), 64, 64)
    BlockMap(2 query blocks of 64, key blocks of 64)
    """

    kind: ClassVar[str] = "block_map"
    lists: torch.Tensor
    counts: torch.Tensor
    block_q: int
    block_k: int
    sizes: torch.Tensor | None

    def __init__(
        self, lists: torch.Tensor, counts: torch.Tensor, block_q: int, block_k: int, sizes: torch.Tensor | None = None
    ) -> None:
        for name, tensor, rank in (("lists", lists, 4), ("counts", counts, 3)):
            if not isinstance(tensor, torch.Tensor) or tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
                raise TypeError(f"{name}: an integer tensor is needed, got {getattr(tensor, 'dtype', type(tensor))}")
            if tensor.dim() != rank:
                raise ValueError(f"{name}: rank {rank} is needed, got shape {list(tensor.shape)}")
        if lists.shape[:3] != counts.shape:
            raise ValueError(f"counts: shape {list(lists.shape[:3])} is needed to match lists, got {list(counts.shape)}")
        for name, size in (("block_q", block_q), ("block_k", block_k)):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}: a positive number of rows is needed, got {size!r}")
        self._freeze(
            lists=lists, counts=counts, block_q=block_q, block_k=block_k, sizes=sizes, facts=StructureFacts()
        )

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        blocks = -(-q_shape[1] // self.block_q)
        if self.lists.shape[2] != blocks:
            raise ValueError(f"lists: {blocks} query blocks are needed for Sq={q_shape[1]}, got {self.lists.shape[2]}")

    def __repr__(self) -> str:
        return f"BlockMap({self.lists.shape[2]} query blocks of {self.block_q}, key blocks of {self.block_k})"
