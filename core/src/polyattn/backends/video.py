"""VideoTiles over any kernel of dense attention: only kept tiles are computed, without padding their queries.

Means and scores are computed in float32 (float64 of float64) whatever the inputs are; the highest scores are kept, the
lowest index winning a tie.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from polyattn.backends.blocked import compute_dtype
from polyattn.backends.calls import Kernel, Result, wants_grad, written
from polyattn.backends.derived import derived
from polyattn.backends.listed import KeyBlocks, attend_listed, rows_of
from polyattn.backends.video_coarse import in_tile_order, plus_coarse, same_sizes, scores_of
from polyattn.structures.video_meta import VideoTilesMeta


def video_tiles(
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: VideoTilesMeta,
    causal: bool,
    scale: float,
    window: None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """A slot for "video_tiles" over `attend`."""
    dtype, rows = q.dtype, q.shape[1]
    q, k, v = (in_tile_order(x, meta) for x in (q, k, v))
    if wants_grad(q, k, v):  # a key's gradient is a sum over all tiles that keep it
        q, k, v = (x.to(compute_dtype(dtype)) for x in (q, k, v))
    scores = scores_of(q, k, meta, scale)
    result, lse = _fine(attend, q, k, v, kept_lists(scores.detach(), meta), meta, scale, need_lse)
    back = _raster(meta, rows)
    if rows > meta.used:
        result = pad(result, (0, 0, 0, 0, 0, 1))
        lse = None if lse is None else pad(lse, (0, 1), value=float("-inf"))
    result = result.index_select(1, back).to(dtype)
    lse = None if lse is None else lse.index_select(2, back)
    if meta.gate is not None:
        result = plus_coarse(result, scores, v, meta)
    return written(out, result), lse


def kept_lists(scores: torch.Tensor, meta: VideoTilesMeta) -> torch.Tensor:
    """scores [B,H,n,n] -> int64 [B,H,video_blocks,K]: the blocks that each tile of the video sees, ascending."""
    of_tiles = scores.narrow(2, meta.prefix_blocks, meta.video_blocks).narrow(3, meta.prefix_blocks, meta.video_blocks)
    best = of_tiles.sort(dim=-1, descending=True, stable=True).indices.narrow(3, 0, meta.kept).sort(dim=-1).values
    beside = torch.arange(meta.prefix_blocks, device=scores.device).expand(*best.shape[:3], -1)
    return torch.cat([beside, best + meta.prefix_blocks], dim=-1)


def _fine(
    attend: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lists: torch.Tensor,
    meta: VideoTilesMeta,
    scale: float,
    need_lse: bool,
) -> Result:
    """q, k, v [B,used,H,D] in tile order -> out [B,used,H,Dv], lse [B,H,used]: segments first, then tiles by size."""
    pieces = []
    if meta.prefix_rows:
        beside = q.narrow(1, 0, meta.prefix_rows)
        pieces.append(attend(beside, k, v, mask=None, causal=False, scale=scale, softcap=0.0, need_lse=need_lse))
    rows, blocks = rows_of(k, v), _key_blocks(meta)
    for group in same_sizes(meta, meta.prefix_blocks):
        queries = q.index_select(1, group.places).unflatten(1, (-1, group.size))
        listed = lists.index_select(2, group.blocks - meta.prefix_blocks)
        out, lse = attend_listed(attend, queries, rows, listed, None, blocks, scale=scale, need_lse=need_lse)
        pieces.append((out.flatten(1, 2), None if lse is None else lse.flatten(2)))
    result = torch.cat([out for out, _ in pieces], dim=1)
    return result, torch.cat([lse for _, lse in pieces if lse is not None], dim=2) if need_lse else None


def _key_blocks(meta: VideoTilesMeta) -> KeyBlocks:
    def build() -> KeyBlocks:
        bounds = meta.starts.to(torch.int64)
        starts, ends = (bounds.narrow(0, first, meta.blocks) for first in (0, 1))
        tiles = sorted(meta.sizes[meta.prefix_blocks :])
        least, most = (meta.prefix_rows + sum(some) for some in (tiles[: meta.kept], tiles[-meta.kept :]))
        return KeyBlocks(starts, ends - starts, least, most)

    return derived(meta, ("key_blocks", meta.kept), build)


def _raster(meta: VideoTilesMeta, rows: int) -> torch.Tensor:
    """int64 [S]: where `_fine` has each row; rows past `used` are at the place after the last one."""

    def build() -> torch.Tensor:
        device = meta.order.device
        beside = torch.arange(meta.prefix_rows, device=device)
        places = torch.cat([beside, *(group.places for group in same_sizes(meta, meta.prefix_blocks))])
        back = torch.full((rows,), meta.used, dtype=torch.int64, device=device)
        return back.scatter(0, meta.order.take(places).to(torch.int64), torch.arange(meta.used, device=device))

    return derived(meta, ("raster", rows), build)
