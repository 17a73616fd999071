"""How the flash kernel is launched, for the compile check."""

from __future__ import annotations

from typing import Any

from polyattn.kernels.flash_kernel import attend_kernel, marked_kernel
from polyattn.kernels.score_factors import CAPPED, CAPPED_EXACTLY, UNCAPPED
from polyattn.kernels.tiles import chunks, tile_for
from tests.kernels.offline import ALL, Signature

_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4}
_TENSORS = ("cu_q", "cu_k", "used_q", "used_k", "keep", "keep_q", "ends")


def signatures(
    name: str,
    dtype: str,
    head_dim: int,
    v_head_dim: int | None = None,
    *,
    tensors: dict[str, str] | None = None,
    left: bool = False,
    right: bool = False,
    capped: int = UNCAPPED,
    lse: bool = True,
    kernel: Any = attend_kernel,
    targets: tuple[str, ...] = ALL,
    spills_allowed: int = 0,
) -> tuple[Signature, ...]:
    """One signature an architecture: each has its own tile."""
    given = (name, dtype, head_dim, v_head_dim or head_dim, tensors or {}, left, right, capped, lse, kernel)
    return tuple(_signature(*given, arch, spills_allowed) for arch in targets)


def _signature(
    name: str,
    dtype: str,
    head_dim: int,
    v_head_dim: int,
    tensors: dict[str, str],
    left: bool,
    right: bool,
    capped: int,
    lse: bool,
    kernel: Any,
    arch: str,
    spills_allowed: int,
) -> Signature:
    tile = tile_for(arch, head_dim, v_head_dim, _BYTES[dtype])
    keys, values = chunks(head_dim), chunks(v_head_dim)
    arguments: dict[str, Any] = {parameter.name: "i32" for parameter in kernel.params if not parameter.is_constexpr}
    arguments |= dict.fromkeys(("q", "k", "v", "out"), f"*{dtype}:16")
    arguments |= dict.fromkeys(("inner", "outer"), "fp32")
    arguments |= dict.fromkeys(_TENSORS, None) | tensors
    arguments |= {
        "lse": "*fp32:16" if lse else None,
        "D": head_dim, "D0": keys.first, "D1": keys.second, "V": v_head_dim, "V0": values.first, "V1": values.second,
        "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "LEFT": left, "RIGHT": right, "CAPPED": capped,
        "UNIT": 16 // _BYTES[dtype], "WIDE": False, "SIGN": 1.0,
    }  # fmt: skip
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    # The large tile of Hopper keeps a few registers on the stack, and is 17% faster all the same (on an H200).
    hopper = arch == "sm_90" and max(head_dim, v_head_dim) > 64 and tile.block_n == 128
    return Signature(name, kernel, arguments, options, (arch,), 256 if hopper else spills_allowed)


_PACKED = {"cu_q": "*i32", "cu_k": "*i32"}
#: Architectures that stand for the others of their vendor.
_SOME = ("sm_80", "sm_90", "gfx942")
_LENGTHS = {"used_q": "*i32", "used_k": "*i32"}
_MARKED = {**_LENGTHS, "only_if": "*i32"}
_HOLES = {"keep": "*i1:16", "keep_q": "*i1:16", "used_k": "*i32"}

SIGNATURES = (
    *signatures("dense-64", "bf16", 64),
    *signatures("dense-128", "bf16", 128, lse=False),
    *signatures("causal-128", "bf16", 128, right=True),
    *signatures("lengths-128", "bf16", 128, tensors=_LENGTHS),
    *signatures("packed-causal-128", "bf16", 128, tensors=_PACKED, right=True),
    *signatures("dense-256", "bf16", 256),
    # What changes only the arithmetic is compiled for the smallest of them.
    *signatures("holes-window-softcap-64", "fp16", 64, tensors=_HOLES, left=True, right=True, capped=CAPPED),
    *signatures("exact-softcap-64", "fp32", 64, capped=CAPPED_EXACTLY, targets=_SOME),
    *signatures("packed-spans-96", "bf16", 96, 64, tensors={**_PACKED, "ends": "*i32:16"}, targets=_SOME),
    *signatures("single-precision-64", "fp32", 64, targets=_SOME),
    *signatures("wide-512", "bf16", 512, targets=_SOME),
    # On sm_80 its outer loops take two registers too many, outside of the loop over keys.
    *signatures("marked-128", "bf16", 128, tensors=_MARKED, kernel=marked_kernel, targets=_SOME, spills_allowed=8),
)
