"""How the kernel that writes into pages is launched, for the compile check."""

from __future__ import annotations

from typing import Any

from polyattn.kernels import row_tiles
from polyattn.kernels.page_kernels import write_rows_kernel
from tests.kernels.offline import Signature


def _write(name: str, dtype: str, itemsize: int, heads: int, dims: tuple[int, int], *, dense: bool) -> Signature:
    tile = row_tiles.tile_of(itemsize)
    kernel = write_rows_kernel
    arguments: dict[str, Any] = {parameter.name: "i32" for parameter in kernel.params if not parameter.is_constexpr}
    arguments |= dict.fromkeys(("k", "v", "k_pool", "v_pool"), f"*{dtype}:16")
    arguments |= {"slots": "*i64", "PAGE": 16, "TILE": tile, "UNIT": 8}
    for letter, dim in zip("KV", dims, strict=True):
        arguments |= {
            f"{letter}_WIDTH": heads * dim, f"{letter}_DIM": dim, f"{letter}_STEP": 1, f"{letter}_POOL_STEP": 1,
            f"{letter}_DENSE": dense, f"{letter}_POOL_DENSE": True,
            f"{letter}_COLUMNS": row_tiles.columns(heads * dim, tile),
        }  # fmt: skip
    return Signature(name, kernel, arguments, {"num_warps": row_tiles.WARPS})


SIGNATURES: tuple[Signature, ...] = (
    _write("dense", "bf16", 2, 8, (128, 128), dense=True),
    _write("strided", "fp32", 4, 5, (72, 40), dense=False),
)
