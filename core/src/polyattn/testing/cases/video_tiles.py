"""VideoTiles cases: grids that do not divide, segments beside the video, padding, gates, every number of kept tiles.

Which tiles are kept turns on scores that two right answers round differently. So queries and keys are made with means
that rank the tiles of the video clearly, each sample and head in its own order.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from polyattn.reference.video_tiles import blocks_of
from polyattn.structures import VideoLayout, VideoTiles
from polyattn.testing.cases.call import (
    Call,
    Case,
    captures,
    cold_captures,
    edges,
    edges_without_lse,
    surroundings,
    unsynced,
)
from polyattn.testing.cases.maker import PLAIN, Heads, Maker, contiguous_buffer, spoil, strided_buffer
from polyattn.testing.cases.variations import HEAD_DIMS

#: Directions in which query tiles look, and how far apart the ranks of keys along one are.
_DIRECTIONS, _REACH = 4, 4.0

GRID, TILE = (5, 6, 10), (4, 4, 4)
WIDE = (4, 8, 8)


def video_tiles(
    make: Maker,
    heads: Heads = PLAIN,
    *,
    grid: tuple[int, int, int] = GRID,
    tile: tuple[int, int, int] = TILE,
    prefix: tuple[int, ...] = (),
    padding: int | None = None,
    topk: int = 3,
    batch: int = 1,
    gate: str = "",
    spare_gate: int = 0,
    **given: Any,
) -> Call:
    """One video, of which each query tile keeps `topk` tiles.

    padding  rows after the tokens, which hold garbage; None: the layout does not say how many rows are used
    gate     how its strides lie; "": no gate. Its rows past the tokens hold garbage too
    """
    rule = {name: given.pop(name) for name in ("scale",) if name in given}
    layout = VideoLayout(grid, prefix)
    if padding is not None:
        layout = VideoLayout(grid, prefix, used=layout.tokens)
    structure = VideoTiles(layout, tile, topk=topk, **given)
    rows = layout.rows + (padding or 0)
    q, k, v = make.qkv((batch, rows), (batch, rows), heads)
    _rank(make, q, k, structure)
    weight = make.normal((batch, rows + spare_gate, *q.shape[2:3], v.shape[3]), gate) if gate else None
    for tensor in (q, k, v) if weight is None else (q, k, v, weight):
        spoil(*(sample[layout.rows :] for sample in tensor))
    return Call(q, k, v, structure, gate=weight, **rule)


def segment_video(make: Maker, **changed: Any) -> Call:
    """Text, condition frames and audio before the video, none of which fills whole chunks of 64."""
    return video_tiles(make, **{"prefix": (30, 70, 9), "gate": "contiguous", **changed})


def _rank(make: Maker, q: torch.Tensor, k: torch.Tensor, structure: VideoTiles) -> None:
    """Write means into q and k: a query tile looks along one direction, and keys of a tile lie at its rank along each.

    A tile's own noise is moved to have no mean, so that scores differ by a rank's step or not at all.
    """
    block_of, segment_blocks = blocks_of(structure.layout, structure.tile)
    block = make.integers(block_of, torch.int64)
    blocks, device = segment_blocks + structure.num_tiles, q.device
    ranks = torch.stack([make.ranks(structure.num_tiles) for _ in range(k.shape[0] * k.shape[2] * _DIRECTIONS)]).view(
        k.shape[0], k.shape[2], _DIRECTIONS, -1
    )
    levels = (ranks / max(1, structure.num_tiles - 1) * 2 - 1) * _REACH
    key_means = torch.zeros(k.shape[0], blocks, k.shape[2], k.shape[3], device=device)
    key_means[:, segment_blocks:, :, :_DIRECTIONS] = levels.permute(0, 3, 1, 2).to(device)
    query_means = torch.zeros(q.shape[0], blocks, q.shape[2], q.shape[3], device=device)
    looks = make.choices((q.shape[0], blocks, q.shape[2], 1), _DIRECTIONS)
    query_means.scatter_(3, looks, _REACH)
    for tensor, wanted in ((q, query_means), (k, key_means)):
        tokens = tensor[:, : block.shape[0]]
        noise = tokens.float()
        sums = torch.zeros_like(wanted).index_add_(1, block, noise)
        sizes = torch.bincount(block, minlength=blocks).clamp(min=1)[None, :, None, None]
        tokens.copy_(noise - (sums / sizes).index_select(1, block) + wanted.index_select(1, block))


_H3 = partial(segment_video, padding=17)
_WEIGHTED = partial(video_tiles, gate="contiguous")

_HEADS = {
    "one_head": Heads(1, 1), "gqa": Heads(6, 2), "mqa": Heads(4, 1), "v_dim_narrower": Heads(v_dim=32),
    "v_dim_wider": Heads(v_dim=128), "gqa_v_dim": Heads(4, 2, v_dim=32),
}  # fmt: skip
#: Heads for which a platform may have a kernel of its own.
_WIDE_HEADS = Heads(4, 2, head_dim=128)
_STRIDES = {
    f"strides_{name}": Heads(strides=(name,) * 3)
    for name in ("transposed", "fused", "stepped", "misaligned", "row_gaps")
}

CASES = (
    *edges(
        "video_tiles",
        {
            "plain": video_tiles,
            "whole_tiles": partial(video_tiles, grid=(8, 8, 8)),
            "one_frame_tail": partial(video_tiles, grid=(9, 4, 8)),
            "batch": partial(video_tiles, batch=2),
            "batch_gqa": partial(video_tiles, heads=Heads(4, 2), batch=2),
            "one_tile_kept": partial(video_tiles, topk=1),
            "tiles_of_256": partial(video_tiles, grid=(5, 9, 18), tile=WIDE),
            "long_tiles": partial(video_tiles, tile=(1, 6, 10), topk=2),
            "odd_volume": partial(video_tiles, grid=(6, 7, 8), tile=(3, 3, 3), topk=5),
            "padded": partial(video_tiles, padding=21),
            "segments": partial(segment_video, gate=""),
            "segments_batch_gqa": partial(segment_video, heads=Heads(4, 2), batch=2, gate="", padding=3),
            "scale_zero": partial(video_tiles, scale=0.0),
            "scale_given": partial(video_tiles, scale=0.37),
            "scale_negative": partial(video_tiles, scale=-0.2),
            "all_kept": partial(video_tiles, topk=99),
            "all_kept_padded": partial(video_tiles, topk=99, padding=21),
            "all_kept_sparsely": partial(video_tiles, topk=99, padding=21, keep_sparse_numerics=True),
            "wide_heads_tiles_of_256": partial(video_tiles, grid=(5, 9, 18), tile=WIDE, heads=_WIDE_HEADS),
            "wide_heads_segments": partial(segment_video, heads=_WIDE_HEADS, batch=2, gate="", padding=3),
            "too_short_to_be_sparse": partial(video_tiles, min_seq_len=10_000, fallback="dense"),
            **{name: partial(video_tiles, heads=heads) for name, heads in _HEADS.items()},
        },
    ),
    *edges_without_lse(
        "video_tiles",
        {
            "gate": _WEIGHTED,
            "gate_transposed": partial(video_tiles, gate="transposed"),
            "gate_longer": partial(_WEIGHTED, spare_gate=40),
            "gate_batch_gqa": partial(_WEIGHTED, heads=Heads(4, 2), batch=2),
            "gate_v_dim": partial(_WEIGHTED, heads=Heads(4, 2, v_dim=32)),
            "gate_padded": partial(_WEIGHTED, padding=21),
            "gate_segments": segment_video,
            "gate_segments_padded": partial(_H3, batch=2),
            "gate_tiles_of_256": partial(_H3, grid=(5, 9, 18), tile=WIDE),
            "gate_wide_heads": partial(_H3, grid=(5, 9, 18), tile=WIDE, heads=_WIDE_HEADS),
            "gate_wide_heads_all_kept": partial(_H3, heads=_WIDE_HEADS, topk=99, keep_sparse_numerics=True, scale=-0.2),
            "gate_all_kept": partial(_WEIGHTED, topk=99),
            "gate_all_kept_padded": partial(_H3, topk=99),
            "gate_all_kept_sparsely": partial(_H3, topk=99, keep_sparse_numerics=True),
            "gate_scale_given": partial(_WEIGHTED, scale=0.37),
            **{name: partial(_WEIGHTED, heads=heads) for name, heads in _STRIDES.items()},
            **{f"head_dim_{size}": partial(video_tiles, heads=Heads(head_dim=size)) for size in HEAD_DIMS},
        },
    ),
    Case("video_tiles/out", "video_tiles", video_tiles, buffer=contiguous_buffer),
    Case("video_tiles/out_strided", "video_tiles", _H3, buffer=strided_buffer),
    Case("video_tiles/out+lse", "video_tiles", video_tiles, lse=True, buffer=contiguous_buffer),
    Case("video_tiles/lse+grad", "video_tiles", video_tiles, lse=True, grad=True),
    Case("video_tiles/deterministic", "video_tiles", _H3, deterministic=True),
    Case("video_tiles/deterministic+grad", "video_tiles", _H3, grad=True, deterministic=True),
    *surroundings("video_tiles", {"": video_tiles}),
    *(case for case in surroundings("video_tiles", {"_gate": _H3}) if not case.lse),
    *captures("video_tiles", {"": video_tiles}),
    Case("video_tiles/captured_gate", "video_tiles", _H3, within="capture"),
    *cold_captures("video_tiles", {"": video_tiles}),
    *unsynced("video_tiles", {"": video_tiles}),
    *(case for case in unsynced("video_tiles", {"_gate": _H3}) if not case.lse),
)
