"""Shapes of video attention that the video benchmarks share, and the parts of our call, each alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import polyattn as pa
from polyattn.kernels.video_attention import Tiling

Triple = tuple[int, int, int]

#: Wan's latents: frames, height, width.
GRIDS: dict[str, Triple] = {"720p": (21, 45, 80), "480p": (21, 30, 52)}
SMALL_GRIDS: dict[str, Triple] = {"720p": (5, 9, 16), "480p": (5, 6, 10)}
TILES: dict[int, Triple] = {64: (4, 4, 4), 256: (4, 8, 8)}


@dataclass(frozen=True)
class Work:
    """The tensors of one call [B,S,H,D] and the tiles that it keeps."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gate: torch.Tensor
    structure: Any

    @property
    def bytes(self) -> int:
        """Of q, k and v."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.q, self.k, self.v))

    def tiling(self) -> Tiling:
        """What the kernels get for it."""
        meta = self.structure.bind(self.q.device, self.q.shape, self.k.shape)
        return Tiling(meta.order, meta.starts, meta.prefix_blocks, meta.kept, max(meta.sizes), meta.used)

    def keeping(self, share: float) -> Work:
        """The same tensors, with another share of the tiles kept."""
        tiles = self.structure
        return Work(self.q, self.k, self.v, self.gate, structure_of(tiles.layout.grid, tiles.tile, share))


def structure_of(grid: Triple, tile: Triple, share: float) -> Any:
    """Tiles of a grid, of which so many are kept, and the sparse route even where that is all of them."""
    return pa.VideoTiles(pa.VideoLayout(grid), tile, sparsity=1.0 - share, keep_sparse_numerics=True)


def work_of(
    name: str, volume: int, share: float, device: torch.device, dtype: torch.dtype, *, small: bool = False
) -> Work:
    """Random q, k, v and gate of 40 heads, few where it is small."""
    grid = (SMALL_GRIDS if small else GRIDS)[name]
    shape = (1, grid[0] * grid[1] * grid[2], 2 if small else 40, 32 if small else 128)
    tensors = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    return Work(*tensors, structure_of(grid, TILES[volume], share))


def peak_bytes(call: Callable[[], Any], device: torch.device) -> int | None:
    """What a call needs beside its inputs and its result, at most; None where nobody counts it."""
    if device.type == "cpu":
        return None
    module = torch.get_device_module(device)
    call()
    module.synchronize()
    module.reset_peak_memory_stats(device)
    before = module.memory_allocated(device)
    result = call()
    module.synchronize()
    out = result[0] if isinstance(result, tuple) else result
    peak: int = module.max_memory_allocated(device)
    return peak - before - out.numel() * out.element_size()
