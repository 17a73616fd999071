"""The coarse branch of VideoTiles in plain torch: every block as the mean of its tokens, their scores, their share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from polyattn.backends.blocked import compute_dtype
from polyattn.backends.derived import derived
from polyattn.structures.video_meta import VideoTilesMeta


@dataclass(frozen=True)
class SameSize:
    """Blocks of one size: int64 blocks [g], and the places of their rows in tile order [g * size]."""

    size: int
    blocks: torch.Tensor
    places: torch.Tensor


def same_sizes(meta: VideoTilesMeta, first: int) -> tuple[SameSize, ...]:
    """The blocks from `first` on, by their size; once for all layers."""

    def build() -> tuple[SameSize, ...]:
        device = meta.order.device
        by_size: dict[int, list[int]] = {}
        for block in range(first, meta.blocks):
            by_size.setdefault(meta.sizes[block], []).append(block)
        groups = []
        for size, numbers in by_size.items():
            blocks = torch.tensor(numbers, dtype=torch.int64, device=device)
            places = meta.starts.index_select(0, blocks).to(torch.int64).unsqueeze(1)
            groups.append(SameSize(size, blocks, (places + torch.arange(size, device=device)).flatten()))
        return tuple(groups)

    return derived(meta, ("same_sizes", first), build)


def in_tile_order(x: torch.Tensor, meta: VideoTilesMeta) -> torch.Tensor:
    """The rows of x [B,S,H,D] that hold tokens, by place: [B,used,H,D]."""
    rows: torch.Tensor = x.index_select(1, meta.order.narrow(0, 0, meta.used))
    return rows


def means(x: torch.Tensor, meta: VideoTilesMeta) -> torch.Tensor:
    """x [B,used,H,D] in tile order -> the mean of each block [B,H,n,D], in float32 (float64 of float64)."""
    groups, dtype = same_sizes(meta, 0), compute_dtype(x.dtype)
    pieces: list[torch.Tensor] = [
        x.index_select(1, group.places).unflatten(1, (-1, group.size)).to(dtype).mean(dim=2) for group in groups
    ]
    if len(groups) == 1:
        return pieces[0].transpose(1, 2)

    def build() -> torch.Tensor:
        return torch.cat([group.blocks for group in groups]).argsort()

    back = derived(meta, "blocks_in_order", build)
    return torch.cat(pieces, dim=1).index_select(1, back).transpose(1, 2)


def scores_of(q: torch.Tensor, k: torch.Tensor, meta: VideoTilesMeta, scale: float) -> torch.Tensor:
    """q, k [B,used,H,D] in tile order -> the scaled scores of all blocks [B,H,n,n]."""
    mean_q, mean_k = means(q, meta), means(k, meta)
    return (mean_q * scale) @ _over_heads(mean_k, q.shape[2]).transpose(-1, -2)


def plus_coarse(fine: torch.Tensor, scores: torch.Tensor, v: torch.Tensor, meta: VideoTilesMeta) -> torch.Tensor:
    """fine [B,S,H,Dv] + gate * coarse, in fine's dtype; `v` [B,used,Hk,Dv] in tile order."""
    assert meta.gate is not None
    coarse = scores.softmax(dim=-1) @ _over_heads(means(v, meta), fine.shape[2])
    rows = coarse.transpose(1, 2).index_select(1, meta.tile_of.narrow(0, 0, meta.used))
    term = meta.gate.narrow(1, 0, meta.used).to(rows.dtype) * rows  # what a gate holds past `used` is not read
    past = fine.shape[1] - meta.used
    return (fine.to(rows.dtype) + (pad(term, (0, 0, 0, 0, 0, past)) if past else term)).to(fine.dtype)


def _over_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[B,Hk,n,D] for each of `heads` query heads."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
