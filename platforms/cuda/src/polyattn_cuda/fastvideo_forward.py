"""The forward of `fastvideo`: tiles into padded blocks, our choice of tiles, its fine branch, the coarse term."""

from __future__ import annotations

from math import log, sqrt

import torch

from polyattn.vendor import VideoTilesMeta, derived
from polyattn_cuda.fastvideo_package import compiled, fine

Result = tuple[torch.Tensor, torch.Tensor | None]


def video_tiles(
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
    """q, k, v [B,S,H,D] of bfloat16 -> out [B,S,H,D], lse [B,H,S]."""
    rows = q.shape[1]
    slots = _slots(meta)
    blocks = [_in_blocks(x, slots, meta) for x in (q, k, v)]
    sizes = (meta.starts[1:] - meta.starts[:-1]).contiguous()
    means = [_means(x, sizes, meta.volume) for x in blocks]
    scores = scale * means[0] @ means[1].transpose(-1, -2)
    with torch.cuda.device_of(q):  # its kernels launch on the current device
        fine_out, aux = _fine(blocks, _block_map(scores, meta), sizes, meta.volume)
    result = q.new_zeros(q.shape) if out is None else out
    tokens = fine_out.index_select(2, slots).transpose(1, 2)
    if meta.gate is not None:
        coarse = (scores.softmax(dim=-1) @ means[2]).index_select(2, meta.tile_of[: meta.used]).transpose(1, 2)
        tokens = tokens + meta.gate[:, : meta.used] * coarse
    result[:, : meta.used] = tokens
    if rows > meta.used and out is not None:
        result[:, meta.used :] = 0.0
    if not need_lse:
        return result, None
    lse = q.new_full((q.shape[0], q.shape[2], rows), float("-inf"), dtype=torch.float32)
    lse[:, :, : meta.used] = _natural(aux, q.shape[3]).index_select(2, slots)
    return result, lse


def _slots(meta: VideoTilesMeta) -> torch.Tensor:
    """int64 [used]: where each row's token is once every block has room for a full tile."""

    def build() -> torch.Tensor:
        block = meta.tile_of[: meta.used].to(torch.int64)
        place = torch.empty_like(block)
        place[meta.order[: meta.used].to(torch.int64)] = torch.arange(meta.used, device=block.device)
        return block * meta.volume + place - meta.starts.to(torch.int64)[block]

    return derived(meta, "fastvideo slots", build)


def _in_blocks(x: torch.Tensor, slots: torch.Tensor, meta: VideoTilesMeta) -> torch.Tensor:
    """[B,S,H,D] -> [B,H,n*volume,D]; what no token fills is 0, for the kernels multiply it."""
    batch, _, heads, width = x.shape
    blocks: torch.Tensor = x.new_zeros(batch, heads, meta.blocks * meta.volume, width)
    return blocks.index_copy_(2, slots, x[:, : meta.used].transpose(1, 2))


def _means(blocks: torch.Tensor, sizes: torch.Tensor, volume: int) -> torch.Tensor:
    """[B,H,n*volume,D] -> the mean token of each block [B,H,n,D], float32."""
    sums: torch.Tensor = blocks.unflatten(2, (-1, volume)).sum(dim=3, dtype=torch.float32)
    return sums / sizes[:, None]


def _block_map(scores: torch.Tensor, meta: VideoTilesMeta) -> torch.Tensor:
    """Bool [B,H,n,n]: the `kept` highest tiles of each tile, the lowest index winning a tie; segments see all, and all
    see them."""
    kept = torch.ones_like(scores, dtype=torch.bool)
    # what is NaN ranks first, as in a sort
    of_tiles = scores[:, :, meta.prefix_blocks :, meta.prefix_blocks :].nan_to_num(float("inf"), float("inf"))
    least = of_tiles.topk(meta.kept, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above, ties = of_tiles > least, of_tiles == least
    room = meta.kept - above.sum(dim=-1, keepdim=True)
    kept[:, :, meta.prefix_blocks :, meta.prefix_blocks :] = above | (ties & (ties.cumsum(dim=-1) <= room))
    return kept


def _fine(
    qkv: list[torch.Tensor], block_map: torch.Tensor, sizes: torch.Tensor, volume: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Its fine branch, sample by sample where it takes but one."""
    function, batch = fine(volume), block_map.shape[0]
    at_once = volume != 64 or not compiled() or batch == 1
    if at_once:
        out, aux = function(*qkv, block_map, sizes)
        return out, aux
    samples = [function(*(x[b : b + 1] for x in (*qkv, block_map)), sizes) for b in range(batch)]
    outs, several = zip(*samples, strict=True)
    return torch.cat(outs), torch.cat(several)


def _natural(aux: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[B,H,n*volume]: natural logarithms of what its kernels return, which say by their rank which of them ran."""
    if aux.dim() == 4:  # compiled for sm_90: -sqrt(D) times the natural one
        return aux.squeeze(3) * (-1.0 / sqrt(head_dim))
    return aux * log(2.0)
