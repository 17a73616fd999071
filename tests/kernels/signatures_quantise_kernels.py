"""How the kernels that quantise to FP8 are launched, for the compile check."""

from __future__ import annotations

from typing import Any

from polyattn.kernels import quantise_kernels, quantise_tiles
from tests.kernels.offline import Signature

#: Where e4m3 is known to the hardware, or to Triton on it: nothing is quantised to it elsewhere.
_FP8 = ("sm_90", "sm_100", "gfx942", "gfx950")


def _arguments(
    dtype: str, heads: int, kv_heads: int, dim: int, v_dim: int, *, rotate: bool, ends: bool, packed: bool = False
) -> dict[str, Any]:
    cuts = {
        "q": quantise_tiles.cut(heads, dim),
        "k": quantise_tiles.cut(kv_heads, dim),
        "v": quantise_tiles.cut(kv_heads, v_dim),
    }
    arguments: dict[str, Any] = {
        "samples": "i32",
        "scales": "i32",
        "length_q": "i32",
        "length_k": "i32",
        "rows_q": "i32",
        "rows_k": "i32",
        "ends_q": "*i32" if ends else None,
        "ends_k": "*i32" if ends else None,
        "largest": "*i32:16",
        "kv_heads": "i32",
        "BLOCK": cuts["q"].block,
        "IN_HEAD": dim // cuts["q"].block,
        "V_BLOCK": cuts["v"].block,
        "V_IN_HEAD": v_dim // cuts["v"].block,
        "GROUP": heads // kv_heads,
        "ROTATE": rotate,
        "PACKED": packed,
        "LOOPS": quantise_tiles.LOOPS,
    }
    for name, cut in cuts.items():
        arguments |= {
            name: f"*{dtype}:16",
            f"{name}_batch": "i32:16",
            f"{name}_row": "i32:16",
            f"{name}_head": "i32:16",
            f"{name.upper()}_UNITS": cut.units,
            f"{name.upper()}_BESIDE": cut.beside,
            f"{name.upper()}_TOKENS": cut.tokens,
        }
    return arguments


def _cast(arguments: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"descale": "*fp32:16", "FACTOR": 0.08838834764831845}
    return arguments | extra | {f"{name}_out": "*fp8e4nv:16" for name in "qkv"}


def _options(warps: int) -> dict[str, int]:
    return {"num_warps": warps, "num_stages": quantise_tiles.STAGES}


_USES = {
    "rotated-128": _arguments("bf16", 40, 40, 128, 128, rotate=True, ends=False),
    "packed-128": _arguments("bf16", 40, 40, 128, 128, rotate=True, ends=True, packed=True),
    "plain-128": _arguments("bf16", 24, 8, 128, 128, rotate=False, ends=True),
    "rotated-72": _arguments("fp16", 16, 16, 72, 40, rotate=True, ends=True),
    "rotated-96": _arguments("bf16", 12, 4, 96, 96, rotate=True, ends=True),
    "rotated-64": _arguments("bf16", 24, 24, 64, 64, rotate=True, ends=False),
    "rotated-256": _arguments("bf16", 8, 8, 256, 128, rotate=True, ends=False),
}

SIGNATURES = (
    *(
        Signature(
            name, quantise_kernels.largest_kernel, use, _options(quantise_tiles.largest_warps(use["BLOCK"])), _FP8
        )
        for name, use in _USES.items()
    ),
    *(
        Signature(name, quantise_kernels.cast_kernel, _cast(use), _options(quantise_tiles.CAST_WARPS), _FP8)
        for name, use in _USES.items()
    ),
)
