"""VideoTiles: a query sees the tiles that its tile's mean ranks highest, plus a gated share of every tile's mean."""

from __future__ import annotations

from itertools import product

import torch

from polyattn.errors import UnsupportedRequest
from polyattn.reference.masked_softmax import masked_softmax
from polyattn.reference.rule import Rule
from polyattn.structures import VideoLayout, VideoTiles


def video_tiles(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, structure: VideoTiles, rule: Rule
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B,S,H,D], k [B,S,Hk,D], v [B,S,Hk,Dv] -> out [B,S,H,Dv], lse [B,H,S] of the fine branch.

    The order of tokens inside a tile says nothing, so the whole meaning follows from which block each row is in.
    """
    rows, used = q.shape[1], structure.layout.rows
    block_of, segment_blocks = blocks_of(structure.layout, structure.tile)
    blocks = max(block_of) + 1
    q, k, v = q[:, :used], k[:, :used], v[:, :used]
    group = q.shape[2] // k.shape[2]

    # Coarse branch: every block is one token, the mean of its own.
    place = torch.tensor(block_of, device=q.device)
    member = (place == torch.arange(blocks, device=q.device)[:, None]).to(q.dtype)  # [n, used]
    share = member / member.sum(dim=1, keepdim=True)
    mean_q, mean_k, mean_v = (torch.einsum("nr,brhd->bhnd", share, t) for t in (q, k, v))
    mean_k, mean_v = mean_k.repeat_interleave(group, dim=1), mean_v.repeat_interleave(group, dim=1)
    scores = rule.scale * mean_q @ mean_k.transpose(-1, -2)  # [B, H, n, n]

    # Fine branch: exact attention to the tokens of the kept blocks.
    kept = kept_blocks(scores.detach(), segment_blocks, _topk(structure))
    out, lse = masked_softmax(q, k, v, kept[:, :, place][..., place], rule)

    if rule.gate is not None:
        coarse = scores.softmax(dim=-1) @ mean_v  # [B, H, n, Dv], over all blocks, kept or not
        out = out + rule.gate[:, :used] * coarse[:, :, place].transpose(1, 2)

    past = rows - used
    out = torch.nn.functional.pad(out, (0, 0, 0, 0, 0, past))
    return out, torch.nn.functional.pad(lse, (0, past), value=float("-inf"))


def _topk(structure: VideoTiles) -> int:
    """How many tiles are kept, which is all of a video that is too short to be sparse."""
    if structure.layout.rows >= structure.min_seq_len:
        return structure.kept
    if structure.fallback == "dense":
        return structure.num_tiles
    raise UnsupportedRequest(
        f"{structure.layout.rows} rows hold tokens, fewer than min_seq_len={structure.min_seq_len}"
    )


def kept_blocks(scores: torch.Tensor, segment_blocks: int, topk: int) -> torch.Tensor:
    """Bool [B,H,n,n]: the blocks each block of queries keeps, by scores [B,H,n,n]; segment blocks come first.

    A tile keeps the `topk` tiles of the highest scores, the lowest index winning a tie, and every segment block; a
    segment block keeps all.
    """
    kept = torch.ones_like(scores, dtype=torch.bool)
    of_tiles = scores[:, :, segment_blocks:, segment_blocks:]
    best = of_tiles.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    kept[:, :, segment_blocks:, segment_blocks:] = torch.zeros_like(of_tiles, dtype=torch.bool).scatter(-1, best, True)
    return kept


def blocks_of(layout: VideoLayout, tile: tuple[int, int, int]) -> tuple[list[int], int]:
    """The block of each row that holds a token, and how many blocks lie in segments, which are numbered first.

    A segment is cut into chunks of a tile's volume, the last one smaller; a token of the video belongs to the tile
    that its coordinates fall in.
    """
    volume = tile[0] * tile[1] * tile[2]
    block_of = [-1] * layout.rows
    blocks = 0
    for start, end in layout.segments:
        for row in range(start, end):
            block_of[row] = blocks + (row - start) // volume
        blocks = block_of[end - 1] + 1
    _, high, wide = (-(-size // edge) for size, edge in zip(layout.grid, tile, strict=True))
    for row, (t, h, w) in enumerate(product(*map(range, layout.grid)), start=layout.video_start):
        block_of[row] = blocks + (t // tile[0] * high + h // tile[1]) * wide + w // tile[2]
    return block_of, blocks
