"""npu_incre_flash_attention on plain tensors: one query a row, the decode kernel under its older name."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu.fia import npu_fused_infer_attention_score
from tests.emulators.npu.stack import require_op

OP = "aclnnIncreFlashAttentionV4"
#: Its name of an argument -> npu_fused_infer_attention_score's.
NAMES = {"scale_value": "scale", "actual_seq_lengths": "actual_seq_lengths_kv"}
LAYOUTS = ("BSH", "BSND", "BNSD")


def npu_incre_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, inner_precise: int = 1, input_layout: str = "BSH",
    **asked: Any,
) -> torch.Tensor:  # fmt: skip
    """The output alone; actual_seq_lengths are the keys'."""
    require_op(input_layout in LAYOUTS, OP, f"input_layout {input_layout} is none of {LAYOUTS}", 161002)
    rows = query.shape[2 if input_layout == "BNSD" else 1] if query.dim() > 2 else 0
    require_op(rows == 1, OP, f"{rows} query rows: one is taken", 161002)
    named = {NAMES.get(name, name): given for name, given in asked.items() if given is not None}
    named |= {"input_layout": input_layout, "inner_precise": inner_precise}
    return npu_fused_infer_attention_score(query, key, value, **named)[0]
