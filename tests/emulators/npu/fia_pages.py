"""What npu_fused_infer_attention_score refuses of a cache in pages, and the keys of one row from it."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu.fia_layouts import PACKED
from tests.emulators.npu.stack import current, require_op

OP = "aclnnFusedInferAttentionScoreV3"
#: The largest page of the kernel for one query.
STEP_PAGE = 512


def check(layout: str, q4: torch.Tensor, kv_heads: int, k: torch.Tensor, v: torch.Tensor, asked: dict[str, Any]) -> int:
    """The value's head dim."""
    table, size, lengths = asked["block_table"], asked["block_size"], asked["actual_seq_lengths_kv"] or []
    dim, step = q4.shape[3], layout not in PACKED and q4.shape[2] == 1
    require_op(layout not in PACKED or current().kernels.tnd_paged, OP, "TND with a block table is not on this CANN")
    require_op(table.dtype == torch.int32 and table.dim() == 2, OP, "block_table must be int32 [B, blocks]", 161002)
    multiple, most = (16, STEP_PAGE) if step else (128, current().kernels.fia_page)
    fits = size > 0 and size % multiple == 0 and size <= most
    require_op(fits, OP, f"block_size {size}: a multiple of {multiple}, <= {most}")
    flat = k.dim() == v.dim() == 3 and k.shape[:2] == v.shape[:2] and k.shape[1:] == (size, kv_heads * dim)
    headed = k.dim() == v.dim() == 4 and k.shape[:3] == v.shape[:3] and k.shape[1:] == (kv_heads, size, dim)
    fits = flat or (headed and layout in ("BNSD", *PACKED))
    require_op(fits, OP, f"a cache of {tuple(k.shape)} and {tuple(v.shape)} with {layout}", 161002)
    require_op(not flat or kv_heads * dim <= 65535, OP, f"a cache with N*D {kv_heads * dim} > 65535")
    require_op(len(lengths) == table.shape[0], OP, f"{len(lengths)} key lengths and a table of {table.shape[0]} rows")
    for row, length in zip(table.tolist(), lengths, strict=True):
        pages = -(-length // size)
        require_op(pages <= len(row), OP, f"{length} keys need {pages} pages, the table has {len(row)}")
        require_op(all(0 <= p < k.shape[0] for p in row[:pages]), OP, f"(emulator) a page of {row} is not in the cache")
    needed = sum(-(-length // size) for length in lengths)
    require_op(k.shape[0] >= needed, OP, f"a cache of {k.shape[0]} pages, the lengths have {needed}")
    return v.shape[3] if headed else v.shape[2] // kv_heads


def check_step_mask(asked: dict[str, Any]) -> None:
    """One query a row: the mask goes to the end of the table."""
    reach = asked["block_table"].shape[1] * asked["block_size"]
    mask = asked["atten_mask"]
    require_op(mask.shape[-1] >= reach, OP, f"atten_mask {tuple(mask.shape)} is shorter than the table's {reach} keys")


def rows_of(pool: torch.Tensor, table: torch.Tensor, length: int, size: int, heads: int) -> torch.Tensor:
    """[Nk,Skv,D] of one row of the table."""
    chosen = pool[table[: -(-length // size)].long()]
    if pool.dim() == 3:
        chosen = chosen.unflatten(2, (heads, -1)).transpose(1, 2)
    return chosen.transpose(0, 1).flatten(1, 2)[:, :length]
