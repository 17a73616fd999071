"""Exact attention of blocks of query rows over listed key blocks on Hopper, torch in and torch out: in Gluon.

For what `hopper_tile` has a tile for. Imported only there: Triton before 3.6 has no Gluon that compiles it.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from polyattn.kernels.launch import launch
from polyattn.kernels.score_factors import score_factors
from polyattn.kernels.video_fine import (
    Blocks,
    Coarse,
    Listed,
    in_order,
    last_axis_dense,
    rows_of,
    sign_of,
    steps_of,
    strides_of,
    unit_of,
)
from polyattn.kernels.video_hopper_kernel import listed_hopper
from polyattn.kernels.video_hopper_parts import PANEL, WIDTH
from polyattn.kernels.video_tiles import HopperTile

_WIDTH, _PANEL = int(WIDTH.value), int(PANEL.value)
#: Registers of a thread as a program starts, by its groups: of one, two programs are to fit.
REGISTERS_OF = {1: 128, 2: 168}


def listed_attention_hopper(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    queries: Blocks,
    keys: Blocks,
    listed: Listed,
    tile: HopperTile,
    *,
    scale: float,
    coarse: Coarse | None = None,
) -> None:
    """As `listed_attention`, of what `hopper_tile` has a tile for, queries and keys in an order of their own.

    Values of a head behind its partial blocks, and those at its first places, must be finite, listed or not: where a
    step is not full they are multiplied by 0.
    """
    samples, _, heads, _ = q.shape
    kv_heads = k.shape[2]
    if min(samples, heads, queries.number, listed.used) == 0:
        return
    q, k, v = (last_axis_dense(tensor) for tensor in (q, k, v))
    gate = None if coarse is None else last_axis_dense(coarse.gate)
    assert queries.order is not None
    assert keys.order is not None
    lines = listed.used + tile.keys  # a step of dense rows is copied whole: behind the last key is no other head's
    k_packed, v_packed = in_order(k, v, keys.order, listed.used, lines)
    if listed.lists is None:
        steps, taken = queries.starts, queries.starts  # never read
        width, list_batch, list_head = 0, 0, 0
    else:
        steps, taken = steps_of(listed, keys, tile.box)
        width = steps.shape[3]
        list_batch, list_head = (
            0 if size == 1 else step for size, step in zip(taken.shape, rows_of(taken), strict=False)
        )
    strides = [stride for tensor in (q, out, gate) for stride in strides_of(tensor)]
    unit = unit_of(strides, q.element_size())
    factors = score_factors(abs(scale) or 1.0, 0.0, q.element_size())
    parts = max(1, -(-queries.largest // tile.rows))
    launch(
        listed_hopper, (parts * queries.number * heads * samples,), q.device,
        q, out, lse, gate, None if coarse is None else coarse.values, described(k_packed, tile.box),
        described(v_packed, tile.box), queries.order, queries.starts, queries.ends, steps, taken,
        *(stride // unit for stride in strides), *((0, 0) if lse is None else lse.stride()[:2]), list_batch, list_head,
        width, listed.every, listed.used, lines, queries.number, parts, heads, heads // kv_heads, factors.outer,
        UNIT=unit, SIGN=sign_of(scale), GROUPS=tile.groups, EVERY=listed.every > 0, BOX=tile.box, KEYS=tile.keys,
        STAGES=tile.stages, num_warps=4, maxnreg=REGISTERS_OF[tile.groups], enable_fp_fusion=factors.fused,
    )  # fmt: skip


def described(rows: torch.Tensor, box: int) -> Any:
    """A descriptor of boxes of rows [B,H,S,128]."""
    layout = NVMMASharedLayout(swizzle_byte_width=2 * _PANEL, element_bitwidth=16, rank=2)
    return TensorDescriptor(rows, [rows.numel() // _WIDTH, _WIDTH], [_WIDTH, 1], [box, _PANEL], layout)
