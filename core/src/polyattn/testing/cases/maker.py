"""Makes the tensors of a case from a seed, in every way that strides can lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, ...]
Fill = Callable[[Shape], torch.Tensor]

#: The values that a hidden row may hold.
GARBAGE = (float("nan"), float("inf"), float("-inf"))


@dataclass(frozen=True)
class Heads:
    """Heads, head dims and strides of q, k, v; None is the head_dim that fits the backend under test."""

    query: int = 2
    kv: int = 2
    head_dim: int | None = None
    v_dim: int | None = None
    strides: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous")


#: Two heads, query and KV alike, contiguous.
PLAIN = Heads()


class Maker:
    """A seeded source of tensors of one dtype on one device, with the sizes that fit the backend under test."""

    def __init__(
        self, seed: int, dtype: torch.dtype, device: torch.device, head_dim: int = 64, page_size: int = 4
    ) -> None:
        self.dtype, self.device = dtype, device
        self.head_dim, self.page_size = head_dim, page_size
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, shape: Shape, strides: str = "contiguous") -> torch.Tensor:
        """Unit-normal numbers [..., rows, heads, head_dim] whose strides lie as `STRIDES` describes."""
        return STRIDES[strides](self._normal, shape)

    def qkv(
        self, q_rows: Shape, k_rows: Shape, heads: Heads = PLAIN
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [*q_rows,H,D], k [*k_rows,Hk,D], v [*k_rows,Hk,Dv]."""
        head_dim = heads.head_dim or self.head_dim
        v_dim = heads.v_dim or head_dim
        q, k, v = heads.strides
        return (
            self.normal((*q_rows, heads.query, head_dim), q),
            self.normal((*k_rows, heads.kv, head_dim), k),
            self.normal((*k_rows, heads.kv, v_dim), v),
        )

    def chance(self, shape: Shape, share: float = 0.7) -> torch.Tensor:
        """Bool, True with this probability."""
        return (torch.rand(shape, generator=self._generator) < share).to(self.device)

    def integers(self, data: Sequence[Any], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        """An integer tensor on the device."""
        return torch.tensor(data, dtype=dtype, device=self.device)

    def ranks(self, count: int) -> torch.Tensor:
        """0 to count - 1 in a random order, float32 on the host."""
        return torch.randperm(count, generator=self._generator).float()

    def choices(self, shape: Shape, of: int) -> torch.Tensor:
        """int64 numbers below `of`."""
        return torch.randint(of, shape, generator=self._generator).to(self.device)

    def _normal(self, shape: Shape) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self._generator, dtype=torch.float32)
        return numbers.to(self.dtype).to(self.device)


def written(tensor: torch.Tensor) -> torch.Tensor:
    """The view to write through: one of the heads where all share memory."""
    return tensor[..., :1, :] if tensor.stride(-2) == 0 else tensor


def spoil(*tensors: torch.Tensor) -> None:
    """Write NaN, +inf and -inf in turn over the first axis's rows: what a row that nobody sees may hold."""
    for tensor in tensors:
        for index in range(tensor.shape[0]):
            tensor[index] = GARBAGE[index % len(GARBAGE)]


def contiguous_buffer(make: Maker, shape: Shape) -> torch.Tensor:
    """A buffer for `out=`, poisoned."""
    return torch.full(shape, float("nan"), dtype=make.dtype, device=make.device)


def strided_buffer(make: Maker, shape: Shape) -> torch.Tensor:
    """A buffer that is the front half of a wider one, poisoned."""
    return contiguous_buffer(make, (*shape[:-1], 2 * shape[-1]))[..., : shape[-1]]


def _transposed(fill: Fill, shape: Shape) -> torch.Tensor:
    *front, rows, heads, dim = shape
    return fill((*front, heads, rows, dim)).transpose(-3, -2)


def _fused(fill: Fill, shape: Shape) -> torch.Tensor:
    *front, heads, dim = shape
    return fill((*front, 3, heads, dim)).select(-3, 1)


def _stepped(fill: Fill, shape: Shape) -> torch.Tensor:
    return fill((*shape[:-1], 2 * shape[-1]))[..., ::2]


def _misaligned(fill: Fill, shape: Shape) -> torch.Tensor:
    length = 1
    for size in shape:
        length *= size
    return fill((length + 1,))[1:].view(shape)


def _row_gaps(fill: Fill, shape: Shape) -> torch.Tensor:
    *front, rows, heads, dim = shape
    return fill((*front, 2 * rows, heads, dim))[..., ::2, :, :]


def _one_head(fill: Fill, shape: Shape) -> torch.Tensor:
    *front, _, dim = shape
    return fill((*front, 1, dim)).expand(shape)


#: How strides can lie: heads before rows, a slice of fused qkv, every second element, a pointer that is off by one
#: element, every second row, and one head seen as several (stride 0).
STRIDES: dict[str, Callable[[Fill, Shape], torch.Tensor]] = {
    "contiguous": lambda fill, shape: fill(shape),
    "transposed": _transposed,
    "fused": _fused,
    "stepped": _stepped,
    "misaligned": _misaligned,
    "row_gaps": _row_gaps,
    "one_head": _one_head,
}
