"""Results without data, as torch_npu's meta kernels declare them, their slips included."""

from __future__ import annotations

import math
from typing import Any

import torch

from tests.emulators.npu import dtypes
from tests.emulators.npu.fia_layouts import LAYOUTS, facts_of


def npu_fusion_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any,
    **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Seven results."""
    return (*_fusion(query, key, value, head_num, input_layout), 0, 0, 0)


def npu_fusion_attention_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *,
    seed: int = 0, offset: int = 0, **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Seven results. The output is taken for one of the query's shape, and axis 2 for its rows unless it is BSH or SBH.

    So BSND's statistics are declared with heads in the place of rows, and a narrower value's output too wide.
    """
    rows = {"BSH": query.shape[1], "SBH": query.shape[0]}.get(input_layout, query.shape[2])
    batch = query.shape[1] if input_layout == "SBH" else query.shape[0]
    statistics = [query.new_empty((batch, head_num, rows, 8), dtype=torch.float32) for _ in range(2)]
    return (torch.empty_like(query), *statistics, query.new_empty((0,)), seed, offset, 0)


def npu_fusion_attention_v3(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any,
    **named: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """Six tensors."""
    drawn = [query.new_empty((1,), dtype=torch.int64) for _ in range(2)]
    return (*_fusion(query, key, value, head_num, input_layout), *drawn)


def _fusion(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: int, layout: str) -> tuple[torch.Tensor, ...]:
    dim = q.shape[-1] if q.dim() == 4 or layout == "TND" else q.shape[2] // heads
    v_dim = v.shape[-1] if v.dim() == 4 or layout == "TND" else v.shape[2] // max(k.shape[2] // max(dim, 1), 1)
    shape, rows = {
        "BSH": ((*q.shape[:2], heads * v_dim), (q.shape[0], heads, q.shape[1])),
        "SBH": ((*q.shape[:2], heads * v_dim), (q.shape[1], heads, q.shape[0])),
        "BNSD": ((*q.shape[:3], v_dim), (q.shape[0], heads, q.shape[2])),
        "BSND": ((*q.shape[:3], v_dim), (q.shape[0], heads, q.shape[1])),
        "TND": ((*q.shape[:2], v_dim), (q.shape[0], heads)),
    }[layout]
    statistics = [q.new_empty((*rows, 8), dtype=torch.float32) for _ in range(2)]
    return (q.new_empty(shape), *statistics, q.new_empty((0,)))


def gradients(*tensors: torch.Tensor, **asked: Any) -> tuple[torch.Tensor | None, ...]:
    """Five: like q, k, v, the bias and the sink."""
    named = (asked.get("pse"), asked.get("sink"))
    blank = tensors[0].new_empty((0,))
    return (*(torch.empty_like(t) for t in tensors[:3]), *(blank if t is None else torch.empty_like(t) for t in named))


def gradients_v2(*tensors: torch.Tensor, **asked: Any) -> tuple[torch.Tensor | None, ...]:
    """Seven: those of the rope tensors stand before the sink's."""
    five = gradients(*tensors, **asked)
    return (*five[:4], tensors[0].new_empty((0,)), tensors[0].new_empty((0,)), five[4])


def npu_fused_infer_attention_score(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, num_heads: int = 1, input_layout: str = "BSH",
    num_key_value_heads: int = 0, softmax_lse_flag: bool = False, block_table: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(out, LSE; without its flag a tensor of no element, where the op itself may give one)."""
    torch._check(num_heads > 0, lambda: f"numHeads should be greater than 0, but got {num_heads}")
    torch._check(input_layout in LAYOUTS, lambda: f"input_layout {input_layout} is not known")
    facts = facts_of(query, value, input_layout, num_heads, num_key_value_heads or num_heads, block_table is not None)
    out = query.new_empty(facts.out_shape, dtype=out_dtype or query.dtype)
    return out, query.new_empty(facts.lse_shape if softmax_lse_flag else (0,), dtype=torch.float32)


def npu_fused_infer_attention_score_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, num_query_heads: int = 1,
    return_softmax_lse: bool = False, out_dtype: int | None = None, **named: Any,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The same; eight-bit queries give float16 unless out_dtype says otherwise."""
    small = query.dtype in (torch.int8, torch.float8_e4m3fn)
    kind = (torch.float16 if out_dtype is None else dtypes.of(out_dtype)) if small else None
    return npu_fused_infer_attention_score(
        query, key, value, num_heads=num_query_heads, softmax_lse_flag=return_softmax_lse, out_dtype=kind, **named
    )


def like_query(query: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    """npu_prompt_flash_attention and npu_incre_flash_attention."""
    return torch.empty_like(query)


def out_overload(*tensors: torch.Tensor, attention_out: Any, softmax_lse: Any, **named: Any) -> tuple[Any, Any]:
    """The buffers given."""
    return attention_out, softmax_lse


def npu_dynamic_block_quant(
    x: torch.Tensor, *, dst_type: int = 1, row_block_size: int = 1, col_block_size: int = 128, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, float32 scales of each tile)."""
    torch._check(x.dim() in (2, 3), lambda: f"Expected x to have 2 or 3 dimensions, but got {x.dim()}.")
    tiles = (math.ceil(x.shape[-2] / row_block_size), math.ceil(x.shape[-1] / col_block_size))
    codes = x.new_empty(x.shape, dtype=dtypes.of(dst_type) or torch.float8_e5m2)
    return codes, x.new_empty((*x.shape[:-2], *tiles), dtype=torch.float32)


def npu_dynamic_mx_quant(
    input: torch.Tensor, *, axis: int = -1, dst_type: int = dtypes.E2M1, block_size: int = 32, **named: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales as bytes with a last axis of 2)."""
    scales = [*input.shape, 2]
    scales[axis % input.dim()] = (input.shape[axis] + 2 * block_size - 1) // (2 * block_size)
    kind = dtypes.of(dst_type)
    codes = input.new_empty(
        input.shape if kind else (*input.shape[:-1], input.shape[-1] // 2), dtype=kind or torch.uint8
    )
    return codes, input.new_empty(scales, dtype=torch.uint8)
