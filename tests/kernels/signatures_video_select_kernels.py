"""How blocks are pooled, scored and chosen, for the compile check."""

from __future__ import annotations

from typing import Any

from polyattn.kernels.video_select_kernels import choose_kernel, pool_kernel, score_kernel
from polyattn.kernels.video_tiles import POOL_WARPS, POOLED, choose_tile, choose_warps
from tests.kernels.offline import Signature

_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def _numbers(kernel: Any) -> dict[str, Any]:
    return {one.name: "i32" for one in kernel.params if not one.is_constexpr}


# Products of float32 in three parts keep all parts of both factors in registers, beside the coarse sums some too many.
# On sm_90 four warps spill more, and took 0.55 ms where eight took 0.91 (an H200, 1,440 tiles of 40 heads).
def _score(name: str, head_dim: int, arch: str, coarse: bool) -> Signature:
    tile = choose_tile(arch, head_dim)
    return Signature(
        name, score_kernel,
        {
            **_numbers(score_kernel), **dict.fromkeys(("q_means", "k_means", "scores"), "*fp32:16"), "outer": "fp32",
            **dict.fromkeys(("v_means", "coarse"), "*fp32:16" if coarse else None),
            "D": head_dim, "V": head_dim, "BLOCK_D": head_dim, "BLOCK_V": head_dim, "ROWS": tile.rows,
            "COLUMNS": tile.columns, "SIGN": 1.0, "TF32": tile.tf32,
        },
        {"num_warps": tile.warps, "num_stages": 2}, (arch,), 480 if arch == "sm_90" else 160,
    )  # fmt: skip


SIGNATURES = (
    Signature(
        "rows-128", pool_kernel,
        {
            **_numbers(pool_kernel), "x": "*bf16:16", "means": "*fp32:16", "order": "*i32", "starts": "*i32",
            "SIZE": 128, "WIDTH": 128, "ROWS": POOLED // 128, "UNIT": 8,
        },
        {"num_warps": POOL_WARPS}, _TARGETS,
    ),
    *(_score(f"coarse-{size}", size, arch, True) for size in (128, 256) for arch in _TARGETS),
    *(_score("scores-128", 128, arch, False) for arch in _TARGETS),
    # A row of 16384 blocks is a million tokens or more: it may spill.
    *(
        Signature(
            f"of-{columns}", choose_kernel,
            {
                **_numbers(choose_kernel), "scores": "*fp32:16", "lists": "*i32:16", "counts": "*i32:16",
                "BLOCK": columns,
            },
            {"num_warps": choose_warps(columns)}, _TARGETS, 200 if columns > 4096 else 0,
        )
        for columns in (512, 2048, 16384)
    ),
)  # fmt: skip
