"""Exact attention of blocks of query rows over listed key blocks on Hopper, torch in and torch out: in Gluon.

For sm_90, head dims of 128, float16 and bfloat16, and keys in an order of their own. Imported only where it is asked
for by name: Triton before 3.6 has no Gluon that it could be compiled by.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from polyattn.kernels.launch import architecture_of, launch
from polyattn.kernels.score_factors import score_factors
from polyattn.kernels.video_fine import (
    Blocks,
    Coarse,
    Listed,
    _last_axis_dense,
    _rows,
    _steps,
    _strides,
    _unit,
    in_order,
    sign_of,
)
from polyattn.kernels.video_hopper_kernel import listed_hopper
from polyattn.kernels.video_hopper_parts import PANEL, ROWS, WIDTH

_ARCHITECTURE = "sm_90"
_WIDTH, _ROWS, _PANEL = int(WIDTH.value), int(ROWS.value), int(PANEL.value)
#: Shared memory of a program; the bytes of its barriers, and of what the two groups are handed over.
_SHARED, _SMALL = 232_448, 1024
#: Registers of a thread as a program starts, by its groups: of one, two programs are to fit.
REGISTERS_OF = {1: 128, 2: 168}
#: The first place that 32 bits do not hold.
_INT32 = 1 << 31


class HopperTile(NamedTuple):
    """How the fine branch is cut on Hopper.

    box         keys of one entry of the steps: how finely partial blocks are told
    keys        keys of one step of a program
    stages      steps in flight
    groups      of four warps with 64 query rows each: two, or one and two programs a multiprocessor
    turns       whether the two groups of warps take turns with their products
    late        whether sums shrink behind the start of the next products, not before
    once        whether keys and values are given back at once: with fewer barriers, but later
    copying     registers of a thread that copies; the others share what is left
    persistent  as many programs as the device holds, each of which takes rows whenever it is done with others; else
                one for each rows
    """

    box: int = 64
    keys: int = 128
    stages: int = 2
    groups: int = 2
    turns: bool = False
    late: bool = False
    once: bool = False
    copying: int = 24
    persistent: bool = True

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a program, at most."""
        return (self.groups * _ROWS + 2 * self.stages * self.keys) * _WIDTH * 2 + _SMALL


def refused(arch: str, q: torch.Tensor, v: torch.Tensor, keys: Blocks, tile: HopperTile) -> str | None:
    """Why these cannot be served, if they cannot."""
    if arch != _ARCHITECTURE:
        return f"compiled for {_ARCHITECTURE} alone, this is {arch or 'no GPU'}"
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"float16 and bfloat16 are served, got {q.dtype}"
    if (q.shape[3], v.shape[3]) != (_WIDTH, _WIDTH):
        return f"head dims of {_WIDTH} are served, got {q.shape[3]} and {v.shape[3]}"
    if keys.order is None:
        return "keys in an order of their own are served"
    if v.shape[0] * v.shape[2] * v.shape[1] >= _INT32:
        return f"fewer than {_INT32} rows of keys are served"
    if tile.keys not in (64, 128) or tile.box not in (32, 64, 128) or tile.box > tile.keys:
        return f"no steps of {tile.keys} keys in boxes of {tile.box}"
    if tile.groups not in (1, 2) or (tile.turns and tile.groups == 1):
        return f"no {tile.groups} groups of warps{' that take turns' if tile.turns else ''}"
    return None if tile.shared <= _SHARED else f"{tile.shared} bytes of shared memory are needed, {_SHARED} are there"


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
    """As `listed_attention`; a ValueError where `refused` has a reason.

    Rows of v that no list names must be finite: those behind a partial block are multiplied by 0.
    """
    why = refused(architecture_of(q.device), q, v, keys, tile)
    if why is not None:
        raise ValueError(f"attention of listed blocks on Hopper: {why}")
    start(q, k, v, out, lse, queries, keys, listed, tile, scale=scale, coarse=coarse)


def start(
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
    """`listed_attention_hopper` without its look at what is served."""
    samples, _, heads, _ = q.shape
    kv_heads = k.shape[2]
    if min(samples, heads, queries.number, listed.used) == 0:
        return
    q, k, v = (_last_axis_dense(tensor) for tensor in (q, k, v))
    gate = None if coarse is None else _last_axis_dense(coarse.gate)
    assert keys.order is not None
    k_packed, v_packed = in_order(k, v, keys.order, listed.used)
    if listed.lists is None:
        steps, taken = queries.starts, queries.starts  # never read
        width, list_batch, list_head = 0, 0, 0
    else:
        steps, taken = _steps(listed, keys, tile.box)
        width = steps.shape[3]
        list_batch, list_head = (
            0 if size == 1 else step for size, step in zip(taken.shape, _rows(taken), strict=False)
        )
    strides = [stride for tensor in (q, out, gate) for stride in _strides(tensor)]
    unit = _unit(strides, q.element_size())
    factors = score_factors(abs(scale) or 1.0, 0.0, q.element_size())
    order = places(q.shape[1], q.device) if queries.order is None else queries.order
    parts = max(1, -(-queries.largest // (tile.groups * _ROWS)))
    items = parts * queries.number * heads * samples
    programs, counter = items, None
    if tile.persistent:
        held = multiprocessors(q.device) * (1 if tile.groups == 2 else 2)
        programs, counter = min(items, held), q.new_zeros(1, dtype=torch.int32)
    launch(
        listed_hopper, (programs,), q.device,
        q, out, lse, gate, None if coarse is None else coarse.values, described(k_packed, tile.box),
        described(v_packed, tile.box), counter, order, queries.starts, queries.ends, steps, taken,
        *(stride // unit for stride in strides), *((0, 0) if lse is None else lse.stride()[:2]), list_batch, list_head,
        width, listed.every, listed.used, listed.used, queries.number, parts, heads, heads // kv_heads, items,
        factors.outer,
        UNIT=unit, SIGN=sign_of(scale), GROUPS=tile.groups, EVERY=listed.every > 0, BOX=tile.box, KEYS=tile.keys,
        STAGES=tile.stages, TURNS=tile.turns, LATE=tile.late, ONCE=tile.once, COPYING=tile.copying, num_warps=4,
        maxnreg=REGISTERS_OF[tile.groups], enable_fp_fusion=factors.fused,
    )  # fmt: skip


def described(rows: torch.Tensor, box: int) -> Any:
    """A descriptor of boxes of rows [B,H,S,128]."""
    layout = NVMMASharedLayout(swizzle_byte_width=2 * _PANEL, element_bitwidth=16, rank=2)
    return TensorDescriptor(rows, [rows.numel() // _WIDTH, _WIDTH], [_WIDTH, 1], [box, _PANEL], layout)


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs of this size a device runs at once."""
    count: int = torch.get_device_module(device).get_device_properties(device).multi_processor_count
    return count


@cache
def places(rows: int, device: torch.device) -> torch.Tensor:
    """The order of rows that are places themselves."""
    return torch.arange(rows, dtype=torch.int32, device=device)
