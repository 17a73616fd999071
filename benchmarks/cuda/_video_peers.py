"""fastvideo_kernel as the video benchmarks call it: its own functions on tensors already in its padded tiles.

Its extension loads where the driver's libcuda and a new NCCL are there before it; without it, its Triton kernels run,
and the record says which.
"""

from __future__ import annotations

import ctypes
import importlib
import math
import os
import sys
from typing import Any

import torch
from _peers import Call, MissingPeer
from _video_work import Work


def fastvideo(work: Work, topk: int) -> Call:
    """Fine and coarse branch with a gate, without bringing rows into tiles and back."""
    package, volume = _package(), math.prod(work.structure.tile)
    layout = package.build_vsa_metadata(work.structure.layout.grid, work.structure.tile, work.q.device)
    source, target, sizes = (
        layout[name] for name in ("tile_partition_indices", "non_pad_index", "variable_block_sizes")
    )

    def tiled(x: torch.Tensor) -> torch.Tensor:
        rows = x.new_zeros(x.shape[0], sizes.numel() * volume, *x.shape[2:])
        rows[:, target] = x[:, source]
        return rows if volume > 64 else rows.transpose(1, 2).contiguous()

    q, k, v, gate = (tiled(x) for x in (work.q, work.k, work.v, work.gate))
    function = package.video_sparse_attn if volume == 64 else package.video_sparse_attn_bshd
    return lambda: function(q, k, v, sizes, sizes, topk=topk, block_size=work.structure.tile, compress_attn_weight=gate)


def route() -> str:
    """Which of its kernels tiles of 64 take."""
    try:
        _package()
        module: Any = importlib.import_module("fastvideo_kernel.block_sparse_attn")
        return "compiled" if None not in module._get_sm90_ops() else "triton, as its extension does not load"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


def _package() -> Any:
    if "fastvideo_kernel" in sys.modules:
        return sys.modules["fastvideo_kernel"]
    flags = sys.getdlopenflags()
    try:
        ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
        sys.setdlopenflags(os.RTLD_LAZY)
        return importlib.import_module("fastvideo_kernel")
    except OSError as error:
        raise MissingPeer(f"no driver: {error}") from error
    finally:
        sys.setdlopenflags(flags)
