"""How lists are made steps, and keys and values put in tile order, for the compile check."""

from __future__ import annotations

from typing import Any

from polyattn.kernels.video_list_kernels import in_order_kernel, steps_kernel
from polyattn.kernels.video_tiles import MOVE_WARPS, PACK_ROWS, STEPS_CHUNK
from tests.kernels.offline import Signature

_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


def _numbers(kernel: Any) -> dict[str, Any]:
    return {one.name: "i32" for one in kernel.params if not one.is_constexpr}


SIGNATURES = (
    Signature(
        "lists", steps_kernel,
        {
            **_numbers(steps_kernel),
            **dict.fromkeys(("lists", "counts", "starts", "ends", "steps", "taken"), "*i32"),
            "BLOCK_N": 64, "CHUNK": STEPS_CHUNK,
        },
        {"num_warps": 1}, _TARGETS,
    ),
    Signature(
        "keys-and-values", in_order_kernel,
        {
            **_numbers(in_order_kernel),
            **dict.fromkeys(("k", "v", "k_packed", "v_packed"), "*bf16:16"), "order": "*i32",
            "D": 128, "V": 128, "BLOCK_D": 128, "BLOCK_V": 128, "ROWS": PACK_ROWS, "UNIT": 8,
        },
        {"num_warps": MOVE_WARPS}, _TARGETS,
    ),
)  # fmt: skip
