"""How the kernels that quantise to FP8 are launched, for the compile check."""

from __future__ import annotations

from typing import Any

from polyattn.kernels import quantise_kernels, quantise_tiles
from tests.kernels.offline import Signature

#: Those whose hardware, or Triton on it, knows e4m3.
_FP8 = ("sm_90", "sm_100", "gfx942", "gfx950")


def _arguments(
    dtype: str, heads: int, kv_heads: int, dim: int, v_dim: int, *, rotate: bool, used: bool
) -> dict[str, Any]:
    cuts = {
        "q": quantise_tiles.cut(heads, dim),
        "k": quantise_tiles.cut(kv_heads, dim),
        "v": quantise_tiles.cut(kv_heads, v_dim),
    }
    arguments: dict[str, Any] = {
        "batch": "i32",
        "length_q": "i32",
        "length_k": "i32",
        "used_q": "*i32" if used else None,
        "used_k": "*i32" if used else None,
        "largest": "*i32:16",
        "kv_heads": "i32",
        "BLOCK": cuts["q"].block,
        "IN_HEAD": dim // cuts["q"].block,
        "V_BLOCK": cuts["v"].block,
        "V_IN_HEAD": v_dim // cuts["v"].block,
        "GROUP": heads // kv_heads,
        "ROTATE": rotate,
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


def _options(arguments: dict[str, Any]) -> dict[str, int]:
    return {"num_warps": quantise_tiles.warps(arguments["BLOCK"]), "num_stages": quantise_tiles.STAGES}


_USES = {
    "rotated-128": _arguments("bf16", 40, 40, 128, 128, rotate=True, used=False),
    "plain-128": _arguments("bf16", 24, 8, 128, 128, rotate=False, used=True),
    "rotated-72": _arguments("fp16", 16, 16, 72, 40, rotate=True, used=True),
    "rotated-96": _arguments("bf16", 12, 4, 96, 96, rotate=True, used=True),
    "rotated-64": _arguments("bf16", 24, 24, 64, 64, rotate=True, used=False),
    "rotated-256": _arguments("bf16", 8, 8, 256, 128, rotate=True, used=False),
}

SIGNATURES = (
    *(Signature(name, quantise_kernels.largest_kernel, use, _options(use)) for name, use in _USES.items()),
    *(Signature(name, quantise_kernels.cast_kernel, _cast(use), _options(use), _FP8) for name, use in _USES.items()),
)
