"""Slots of the portable Triton backend for video tiles and block maps; importable without Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from polyattn.backends.calls import Result
from polyattn.backends.derived import derived
from polyattn.door.backend import Features, Slot
from polyattn.structures.block_map import BlockMapMeta
from polyattn.structures.transfer import refuse_in_capture
from polyattn.structures.video_meta import VideoTilesMeta

if TYPE_CHECKING:
    from polyattn.kernels.video_fine import Blocks


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
    """q [B,S,H,D], k [B,S,Hk,D], v [B,S,Hk,Dv] in raster order; the gate comes with the meta."""
    from polyattn.kernels.video_attention import Tiling, video_attention  # Triton, on first use

    largest = derived(meta, "largest block", lambda: max(meta.sizes))
    tiling = Tiling(meta.order, meta.starts, meta.prefix_blocks, meta.kept, largest, meta.used)
    return video_attention(q, k, v, out, tiling, scale=scale, gate=meta.gate, need_lse=need_lse)


def block_map(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor | None,
    *,
    meta: BlockMapMeta,
    causal: bool,
    scale: float,
    window: None,
    softcap: float,
    need_lse: bool,
    options: tuple[object, ...],
) -> Result:
    """Lists may be the device's alone: a block that is not there is hidden, wherever they name it."""
    from polyattn.kernels.video_attention import block_map_attention
    from polyattn.kernels.video_fine import Listed

    keys = k.shape[1]
    blocks = derived(meta, ("row blocks", q.shape[1], keys), lambda: _blocks(meta, q.shape[1], keys))
    listed = Listed(meta.lists, meta.counts, keys)
    return block_map_attention(q, k, v, out, *blocks, listed, scale=scale, need_lse=need_lse)


def _blocks(meta: BlockMapMeta, queries: int, keys: int) -> tuple[Blocks, Blocks]:
    """The rows of each query block and of each key block."""
    from polyattn.kernels.video_fine import Blocks

    device = meta.lists.device
    refuse_in_capture(device)
    found = []
    for rows, size, sizes in ((queries, meta.block_q, None), (keys, meta.block_k, meta.sizes)):
        starts = torch.arange(0, rows, size, dtype=torch.int32, device=device)
        ends = (starts + size).clamp(max=rows)
        if sizes is not None:
            ends = torch.minimum(ends, starts + sizes.clamp(min=0)).to(torch.int32)
        found.append(Blocks(starts, ends, min(size, max(rows, 1))))
    return found[0], found[1]


def _features(kind: str) -> Features:
    return Features(
        kinds=frozenset({kind}), lse=True, gqa=True, v_dim=True, deterministic=True, out=True, capture=True,
        dtypes=frozenset({"float16", "bfloat16", "float32"}), head_dims=range(1, 257),
    )  # fmt: skip


SLOTS: tuple[Slot, ...] = tuple(Slot(f"{__name__}:{kind}", _features(kind)) for kind in ("video_tiles", "block_map"))
