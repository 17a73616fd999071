"""Other sparse patterns through the same kernels: sliding tiles and a radial map, each as a `BlockMap`, against a mask.

A pattern's author writes which pairs of blocks are kept; every backend that takes block maps then computes those alone.
"""

import itertools

import torch

import polyattn as pa

GRID, TILE, HEADS, HEAD_DIM = (8, 16, 16), (4, 4, 4), 2, 64


def tile_order(grid: tuple[int, int, int], tile: tuple[int, int, int]) -> torch.Tensor:
    """The raster row of each place when the rows of a tile stand together; the tile must divide the grid."""
    rows = torch.arange(grid[0] * grid[1] * grid[2]).reshape(grid)
    cut = rows.reshape([part for size, side in zip(grid, tile, strict=True) for part in (size // side, side)])
    return cut.permute(0, 2, 4, 1, 3, 5).flatten()


def sliding_tiles(window: tuple[int, int, int]) -> torch.Tensor:
    """[tiles,tiles]: a tile sees the window of tiles around it, moved inwards at the border, as STA has it."""
    sides = [size // side for size, side in zip(GRID, TILE, strict=True)]
    tiles = torch.tensor(list(itertools.product(*(range(side) for side in sides))))
    kept = torch.ones(len(tiles), len(tiles), dtype=torch.bool)
    for axis, (side, wide) in enumerate(zip(sides, window, strict=True)):
        centre = tiles[:, axis].clamp(wide // 2, max(wide // 2, side - 1 - wide // 2))
        kept &= (tiles[None, :, axis] - centre[:, None]).abs() <= wide // 2
    return kept


def radial(block: int) -> torch.Tensor:
    """[blocks,blocks]: the farther apart two frames, the narrower the band of places that see each other."""
    frame = GRID[1] * GRID[2]
    place = torch.arange(GRID[0] * frame // block) * block
    frames = (place // frame)[:, None] - (place // frame)[None, :]
    inside = (place % frame)[:, None] - (place % frame)[None, :]
    return inside.abs() <= frame // 2 ** frames.abs()


def compared(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, block: int) -> None:
    """Print how much the map keeps, what ran, and how far it is from the same pattern as a mask of all pairs."""
    structure = pa.BlockMap.from_mask(kept, block, block)
    with pa.record_routes() as log:
        sparse = pa.attention(q, k, v, structure=structure)
    pairs = kept.repeat_interleave(block, 0).repeat_interleave(block, 1)
    masked = pa.attention(q, k, v, structure=pa.Mask.pairs(pairs))
    error = (sparse - masked).abs().max().item()
    print(f"{name}: {kept.float().mean():.0%} of the pairs, {log.entries[0].route}, {error:.0e} from the mask")


def main() -> None:
    """Two patterns over one small video."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, GRID[0] * GRID[1] * GRID[2], HEADS, HEAD_DIM) for _ in range(3))
    with torch.inference_mode():
        order = tile_order(GRID, TILE)
        compared("sliding tiles", *(x[:, order] for x in (q, k, v)), sliding_tiles((1, 3, 3)), 64)
        compared("radial", q, k, v, radial(64), 64)


if __name__ == "__main__":
    main()
