"""How the kernels of attention over pages are launched, for the compile check: tiles as the policy cuts them."""

from __future__ import annotations

from typing import Any

from polyattn.kernels.combine_kernel import combine_splits_kernel
from polyattn.kernels.paged_kernels import paged_attention_kernel
from polyattn.kernels.paged_tiles import COMBINE_AHEAD, COMBINE_WARPS, COMBINED, Work, paged_tiles, power_of_two
from polyattn.kernels.score_factors import CAPPED, CAPPED_EXACTLY, UNCAPPED
from tests.kernels.offline import ALL, Signature

_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}


def _attention(
    name: str,
    dtype: str,
    head_dim: int,
    page_size: int,
    *,
    rows: int = 192,
    group: int = 3,
    v_head_dim: int | None = None,
    targets: tuple[str, ...] = ALL,
    spills_allowed: int = 0,
    **changed: Any,
) -> tuple[Signature, ...]:
    """One signature an architecture: each has its own tiles. `rows`: queries times heads of a group."""
    v_dim = v_head_dim or head_dim
    signatures = []
    for arch in targets:
        work = Work(rows, 4096, 64, max(head_dim, v_dim), _BYTES[dtype])
        tiles = paged_tiles(work, arch, 132)
        kernel = paged_attention_kernel
        arguments: dict[str, Any] = {parameter.name: "i32" for parameter in kernel.params if not parameter.is_constexpr}
        arguments |= dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}:16")
        arguments |= dict.fromkeys(("part", "part_lse"), "*fp32:16")
        arguments |= dict.fromkeys(("block_table", "kv_lengths"), "*i32") | dict.fromkeys(("factor", "cap"), "fp32")
        arguments |= {
            "lse": None, "q_lengths": None, "ends": None, "GROUP": group, "DIM": head_dim, "V_DIM": v_dim,
            "PAGE": page_size, "UNIT": 16, "Q_STEP": 1, "K_STEP": 1, "V_STEP": 1, "OUT_STEP": 1, "PACKED": False,
            "CAUSAL": True, "LEFT": False, "RIGHT": False, "CAPPED": UNCAPPED, "NEGATIVE": False,
            "ALIKE": head_dim == v_dim, "WIDE": False, "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n,
            "BLOCK_D": max(16, power_of_two(head_dim)), "BLOCK_V": max(16, power_of_two(v_dim)),
        }  # fmt: skip
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        signatures.append(Signature(name, kernel, arguments | changed, options, (arch,), spills_allowed))
    return tuple(signatures)


def _combine(dtype: str, v_dim: int) -> Signature:
    block_v = max(16, power_of_two(v_dim))
    kernel = combine_splits_kernel
    arguments: dict[str, Any] = {parameter.name: "i32" for parameter in kernel.params if not parameter.is_constexpr}
    arguments |= {
        "part": "*fp32:16", "part_lse": "*fp32:16", "out": f"*{dtype}:16", "lse": "*fp32:16", "V_DIM": v_dim, "UNIT": 8,
        "OUT_STEP": 1, "BLOCK_R": COMBINED // block_v, "BLOCK_V": block_v, "AHEAD": COMBINE_AHEAD,
    }  # fmt: skip
    return Signature(f"{dtype}-{v_dim}", kernel, arguments, {"num_warps": COMBINE_WARPS})


_UNSPLIT = {"part": None, "part_lse": None, "lse": "*fp32:16"}
_PACKED = {"q_lengths": "*i32", "PACKED": True}

SIGNATURES: tuple[Signature, ...] = (
    *_attention("bf16-128-page64", "bf16", 128, 64),
    *_attention("bf16-128-page16-unsplit", "bf16", 128, 16, **_UNSPLIT),
    *_attention("bf16-128-page256-decode-packed", "bf16", 128, 256, rows=3, **_PACKED),
    *_attention("fp16-64-page33-window-packed", "fp16", 64, 33, LEFT=True, RIGHT=True, CAUSAL=False, **_PACKED),
    *_attention("bf16-96-page16-spans", "bf16", 96, 16, ends="*i32", CAUSAL=False),
    *_attention("bf16-256-page64-capped", "bf16", 256, 64, CAPPED=CAPPED),
    *_attention("bf16-512-page16", "bf16", 512, 16),
    *_attention("fp16-192-128-page128", "fp16", 192, 128, v_head_dim=128),
    # Triton 3.9 keeps two words on the stack for sm_80, with 80 of 255 registers in use
    *_attention("fp32-128-page64-capped", "fp32", 128, 64, CAPPED=CAPPED_EXACTLY, spills_allowed=8, **_UNSPLIT),
    *_attention("fp32-512-page16", "fp32", 512, 16, rows=16, targets=("sm_80", "sm_90", "gfx942")),
    _combine("bf16", 128),
    _combine("fp32", 80),
)
