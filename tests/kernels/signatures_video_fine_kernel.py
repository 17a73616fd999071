"""How the kernel of listed blocks is launched, for the compile check; also what each tile takes, for the sweep."""

from __future__ import annotations

from typing import Any

from polyattn.kernels.video_fine_kernel import listed_kernel
from polyattn.kernels.video_tiles import VideoTile, power_of_two, video_tile
from tests.kernels.offline import Signature

_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
_ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx942")


def signature(
    name: str,
    dtype: str,
    head_dim: int,
    tile: VideoTile,
    arch: str,
    *,
    v_head_dim: int | None = None,
    gated: bool = False,
    lse: bool = False,
    every: bool = False,
    in_order: bool = False,
    wide: bool = False,
    spills_allowed: int = 0,
) -> Signature:
    """One launch; `in_order`: keys are the places themselves, as they are packed and in block maps."""
    v_head_dim = v_head_dim or head_dim
    block_d, block_v = (max(16, power_of_two(size)) for size in (head_dim, v_head_dim))
    arguments: dict[str, Any] = {one.name: "i32" for one in listed_kernel.params if not one.is_constexpr}
    arguments |= dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}:16")
    arguments |= dict.fromkeys(("order_q", "order_k", "starts", "ends", "steps", "taken"), "*i32")
    for one, width in (("k", block_d), ("v", block_v)):
        described = tile.packed and one in tile.described
        arguments[f"{one}_described"] = f"tensordesc<{dtype}[{tile.block_n}, {width}]>" if described else None
    if tile.packed or in_order:
        arguments["order_k"] = None
    if in_order and not tile.packed:
        arguments["order_q"] = None
    arguments |= {
        "lse": "*fp32" if lse else None, "gate": f"*{dtype}:16" if gated else None,
        "coarse": "*fp32" if gated else None, "outer": "fp32",
        "D": head_dim, "V": v_head_dim, "BLOCK_D": block_d, "BLOCK_V": block_v, "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n, "UNIT": 16 // _BYTES[dtype], "WIDE": wide, "SIGN": 1.0, "EVERY": every,
        "PAIRED": tile.paired,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return Signature(name, listed_kernel, arguments, options, (arch,), spills_allowed)


def _tabled(
    name: str, dtype: str, head_dim: int, block: int, *, targets: tuple[str, ...] = _ARCHITECTURES, **rest: Any
) -> tuple[Signature, ...]:
    """With each architecture's own tile for blocks of so many rows; some keep four registers on the stack."""
    return tuple(
        signature(
            name,
            dtype,
            head_dim,
            video_tile(arch, head_dim, head_dim, _BYTES[dtype], block, block),
            arch,
            spills_allowed=16,
            **rest,
        )
        for arch in targets
    )


SIGNATURES = (
    *_tabled("gated-128-blocks-of-256", "bf16", 128, 256, gated=True),
    *_tabled("gated-128-blocks-of-64", "bf16", 128, 64, gated=True),
    *_tabled("prefix-lse-64", "bf16", 64, 256, every=True, lse=True),
    *_tabled("wide-256", "fp16", 256, 64, wide=True),
    *_tabled("single-precision-64", "fp32", 64, 64, targets=("sm_80", "sm_90", "gfx942")),
    *_tabled("block-map-96", "bf16", 96, 64, in_order=True, lse=True),
    # What the sweep on a GPU chooses from, beside those; pairs of 64 rows keep some registers on the stack.
    *(
        signature(f"tile-{number}", "bf16", 128, tile, "sm_90", gated=True, spills_allowed=400 if tile.paired else 16)
        for number, tile in enumerate(
            (
                VideoTile(64, 64, 4, 3), VideoTile(64, 64, 4, 3, packed=True),
                VideoTile(64, 64, 4, 3, packed=True, described="k"),
                VideoTile(128, 64, 8, 3, packed=True, described="kv"),
                VideoTile(64, 64, 4, 3, packed=True, described="kv", paired=True),
                VideoTile(128, 64, 8, 3, packed=True, described="kv", paired=True),
            )
        )
    ),
)  # fmt: skip
