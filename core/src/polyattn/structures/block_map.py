"""BlockMap: arbitrary block sparsity, as lists of kept key blocks per query block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Meta, Structure
from polyattn.structures.host_data import host_tensor, integer, integer_tensor, on_host
from polyattn.structures.lasting import lasting, normal
from polyattn.structures.transfer import send


@dataclass(frozen=True, eq=False)
class BlockMapMeta(Meta):
    """BlockMap on one device: int32 lists [B|1,H|1,Nq,K], counts [B|1,H|1,Nq], sizes [Nk] or None: all rows are real.

    A block that the keys do not have, before the count, keeps nothing.
    """

    lists: torch.Tensor
    counts: torch.Tensor
    sizes: torch.Tensor | None
    block_q: int
    block_k: int


class BlockMap(Structure):
    """Query block i of head h sees key blocks `lists[b,h,i,:counts[b,h,i]]`, in any order, each at most once.

    lists [B|1,H|1,Nq,K] and counts [B|1,H|1,Nq] are integers, entries past the count are never read; `sizes` [Nk]
    gives the real rows of each key block, which come first in it. Host data are checked; `check=True` checks device
    data too.

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
    last_block: int

    def __init__(
        self, lists: Any, counts: Any, block_q: int, block_k: int, sizes: Any = None, *, check: bool = False
    ) -> None:
        given_lists, given_counts = (
            integer_tensor(name, host_tensor(name, data), rank, shape)
            for name, data, rank, shape in (
                ("lists", lists, 4, "[B|1, H|1, Nq, K]"),
                ("counts", counts, 3, "[B|1, H|1, Nq]"),
            )
        )
        given_sizes = None if sizes is None else integer_tensor("sizes", host_tensor("sizes", sizes), 1, "[Nk]")
        if given_lists.shape[:3] != given_counts.shape:
            raise ValueError(
                f"counts: shape {list(given_lists.shape[:3])} is needed to match lists, got {list(given_counts.shape)}"
            )
        sides = {name: integer(name, size, least=1) for name, size in (("block_q", block_q), ("block_k", block_k))}
        last_block = -1
        if check or (on_host(given_lists) and on_host(given_counts)):
            last_block = _last_block(given_lists.cpu(), given_counts.cpu())
        if given_sizes is not None and (check or on_host(given_sizes)):
            _check_sizes(given_sizes, sides["block_k"])
        self._freeze(
            lists=_kept(given_lists),
            counts=_kept(given_counts),
            sizes=None if given_sizes is None else _kept(given_sizes),
            last_block=last_block,
            facts=StructureFacts(blocks=(sides["block_q"], sides["block_k"])),
            **sides,
        )

    @classmethod
    def from_mask(cls, kept: Any, block_q: int, block_k: int, sizes: Any = None) -> BlockMap:
        """From one truth value a pair of blocks, kept [Nq,Nk] or [B|1,H|1,Nq,Nk]; of device data all is read, once.

        >>> import torch, polyattn as pa
        >>> radial = pa.BlockMap.from_mask(torch.ones(8, 8).tril().triu(-2), 64, 64)
        >>> radial.counts[0, 0].tolist()
        [1, 2, 3, 3, 3, 3, 3, 3]
        """
        mask = torch.as_tensor(kept)
        if mask.dim() not in (2, 4):
            raise ValueError(f"kept: [Nq,Nk] or [B|1,H|1,Nq,Nk] is needed, got shape {list(mask.shape)}")
        mask = (mask != 0).expand(*(1,) * (4 - mask.dim()), *mask.shape)
        counts = mask.sum(-1, dtype=torch.int32)
        width = int(counts.max()) if counts.numel() else 0
        lists = mask.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :width]
        return cls(lists, counts, block_q, block_k, sizes)

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        batch, heads, blocks = self.lists.shape[:3]
        for name, given, want in (("B", batch, q_shape[0]), ("H", heads, q_shape[2])):
            if given not in (1, want):
                raise ValueError(f"lists: axis {name} must be 1 or {want}, got {given}")
        if blocks != -(-q_shape[1] // self.block_q):
            raise ValueError(
                f"lists: {-(-q_shape[1] // self.block_q)} query blocks are needed for Sq={q_shape[1]}, got {blocks}"
            )
        key_blocks = -(-k_shape[1] // self.block_k)
        if self.last_block >= key_blocks:
            raise ValueError(
                f"lists: key block {self.last_block} is named, but Sk={k_shape[1]} has {key_blocks} blocks"
            )
        if self.sizes is not None and self.sizes.shape[0] != key_blocks:
            raise ValueError(f"sizes: one per key block is needed, got {self.sizes.shape[0]} for {key_blocks} blocks")

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> BlockMapMeta:
        sizes = None if self.sizes is None else send(self.sizes, device)
        return BlockMapMeta(send(self.lists, device), send(self.counts, device), sizes, self.block_q, self.block_k)

    def anchors(self) -> tuple[torch.Tensor, ...]:
        tensors = (self.lists, self.counts)
        return tensors if self.sizes is None else (*tensors, self.sizes)

    def anchor_ints(self) -> tuple[int, ...]:
        return (self.block_q, self.block_k)

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> BlockMap:
        return cls(tensors[0], tensors[1], *ints, *tensors[2:])

    def __repr__(self) -> str:
        return f"BlockMap({self.lists.shape[2]} query blocks of {self.block_q}, key blocks of {self.block_k})"


def _last_block(lists: torch.Tensor, counts: torch.Tensor) -> int:
    """The highest key block that a list names, -1 for none; ValueError where lists and counts are malformed."""
    width = lists.shape[-1]
    if counts.numel() and (int(counts.min()) < 0 or int(counts.max()) > width):
        raise ValueError(
            f"counts: 0 to {width} (the width of lists) is needed, got {int(counts.min())} to {int(counts.max())}"
        )
    listed = torch.arange(width, device="cpu") < counts[..., None]
    if bool((lists[listed] < 0).any()):
        raise ValueError(f"lists: key blocks cannot be negative before the count, got {int(lists[listed].min())}")
    # unread entries become distinct negative numbers, so that only a block listed twice makes equal neighbours
    ordered = torch.where(listed, lists.to(torch.int64), -1 - torch.arange(width, device="cpu")).sort(dim=-1).values
    twice = ordered[..., 1:][ordered[..., 1:] == ordered[..., :-1]]
    if twice.numel():
        raise ValueError(f"lists: a key block is kept once or not at all, got {int(twice[0])} twice in one list")
    return int(lists[listed].max()) if bool(listed.any()) else -1


def _check_sizes(sizes: torch.Tensor, block_k: int) -> None:
    if sizes.numel() and (int(sizes.min()) < 0 or int(sizes.max()) > block_k):
        raise ValueError(f"sizes: 0 to block_k={block_k} rows are needed, got {int(sizes.min())} to {int(sizes.max())}")


@lasting
def _kept(tensor: torch.Tensor) -> torch.Tensor:
    """int32 and ours: a copy of host data, a view of device data."""
    return tensor.to(torch.int32, copy=True) if on_host(tensor) else normal(tensor.to(torch.int32))
