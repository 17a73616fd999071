"""How the kernel that looks behind documents is launched, for the compile check."""

from __future__ import annotations

from polyattn.kernels import tails_kernel, tails_tiles
from tests.kernels.offline import Signature

SIGNATURES: tuple[Signature, ...] = tuple(
    Signature(
        f"tails_{dtype}_{heads}x{dim}",
        tails_kernel.tails_kernel,
        {
            "v": f"*{dtype}:16", "batch_stride": "i32:16", "row_stride": "i32:16", "head_stride": "i32:16",
            "dim_stride": 1, "ends": "*i32", "ends_stride": "i32", "rows": "i32", "reach": "i32", "flags": "*i32",
            "HEADS": heads, "DIM": dim, "ROWS": tails_tiles.ROWS, "COLUMNS": tails_tiles.COLUMNS,
        },
        {"num_warps": tails_tiles.WARPS},
    )
    for dtype, heads, dim in (("bf16", 40, 128), ("fp16", 3, 40), ("bf16", 1, 256))
)  # fmt: skip
