"""How the kernels that move rows are launched, for the compile check."""

from __future__ import annotations

from polyattn.kernels import row_kernels, row_tiles
from tests.kernels.offline import Signature


def _pack(dtype: str, itemsize: int, shapes: dict[str, tuple[int, int]], dense: bool) -> dict[str, object]:
    tile = row_tiles.cut(1, itemsize).tile
    arguments: dict[str, object] = {
        "index": "*i64",
        "kept": "i32",
        "length": "i32",
        "total": "i32",
        "TILE": tile,
    }
    for name in "abc":
        heads, dim = shapes.get(name, (1, 1))
        pointer = f"*{dtype}:16" if name in shapes else None
        stride = "i32:16" if name in shapes else 0
        arguments |= {
            name: pointer,
            f"{name}_packed": pointer,
            f"{name}_batch": stride,
            f"{name}_row": stride,
            f"{name}_head": stride,
            f"{name.upper()}_WIDTH": heads * dim,
            f"{name.upper()}_SEGMENT": heads * dim if dense else dim,
            f"{name.upper()}_COLUMNS": row_tiles.cut(heads * dim, itemsize).columns if name in shapes else 1,
        }
    return arguments


def _unpack(dtype: str, itemsize: int, heads: int, dim: int, *, lse: bool) -> dict[str, object]:
    cut = row_tiles.cut(heads * dim, itemsize)
    return {
        "place": "*i32",
        "kept": "i32",
        "length": "i32",
        "total": "i32",
        "packed": f"*{dtype}:16",
        "out": f"*{dtype}:16",
        "out_batch": "i32:16",
        "out_row": "i32:16",
        "out_head": "i32:16",
        "lse": "*fp32:16" if lse else None,
        "lse_head": "i32",
        "lse_out": "*fp32:16" if lse else None,
        "WIDTH": heads * dim,
        "SEGMENT": heads * dim,
        "COLUMNS": cut.columns,
        "TILE": cut.tile,
        "HEADS": heads,
        "LSE_ROWS": row_tiles.LSE_ROWS,
    }


def _clear(heads: int, dim: int, *, lse: bool) -> dict[str, object]:
    cut = row_tiles.cut(heads * dim, 2)
    return {
        "used": "*i32",
        "used_stride": 1,
        "length": "i32",
        "out": "*bf16:16",
        "out_batch": "i32:16",
        "out_row": "i32:16",
        "out_head": "i32:16",
        "out_dim": 1,
        "lse": "*fp32:16" if lse else None,
        "lse_batch": "i32",
        "lse_head": "i32",
        "lse_row": 1,
        "WIDTH": heads * dim,
        "SEGMENT": heads * dim,
        "COLUMNS": cut.columns,
        "TILE": cut.tile,
        "HEADS": heads,
        "LSE_ROWS": row_tiles.LSE_ROWS,
    }


def _blank(heads: int, dim: int, *, lse: bool) -> dict[str, object]:
    arguments = _clear(heads, dim, lse=lse)
    for name in ("used", "used_stride", "TILE", "LSE_ROWS"):
        del arguments[name]
    return arguments | {"keep": "*u8", "COLUMNS": row_tiles.BLANK_COLUMNS, "ROWS": row_tiles.BLANK_ROWS}


_EQUAL = {"a": (24, 128), "b": (24, 128), "c": (24, 128)}
_GROUPED = {"a": (24, 72), "b": (8, 72), "c": (8, 40)}
_WARPS = {"num_warps": row_tiles.WARPS}

SIGNATURES = (
    Signature("pack-dense", row_kernels.pack_kernel, _pack("bf16", 2, _EQUAL, dense=True), _WARPS),
    Signature("pack-heads-apart", row_kernels.pack_kernel, _pack("bf16", 2, _GROUPED, dense=False), _WARPS),
    Signature("pack-one-fp32", row_kernels.pack_kernel, _pack("fp32", 4, {"a": (17, 80)}, dense=True), _WARPS),
    Signature("unpack-lse", row_kernels.unpack_kernel, _unpack("bf16", 2, 24, 128, lse=True), _WARPS),
    Signature("unpack", row_kernels.unpack_kernel, _unpack("fp16", 2, 17, 80, lse=False), _WARPS),
    Signature("clear-lse", row_kernels.clear_kernel, _clear(24, 128, lse=True), _WARPS),
    Signature("blank-lse", row_kernels.blank_kernel, _blank(24, 128, lse=True), {"num_warps": row_tiles.BLANK_WARPS}),
    Signature("blank", row_kernels.blank_kernel, _blank(5, 40, lse=False), {"num_warps": row_tiles.BLANK_WARPS}),
    Signature("clear", row_kernels.clear_kernel, _clear(5, 40, lse=False), _WARPS),
)
