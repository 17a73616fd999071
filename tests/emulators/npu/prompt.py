"""npu_prompt_flash_attention on plain tensors: dense, with a full mask; what MindIE-SD's prompt_flash_attn calls."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu.fia import npu_fused_infer_attention_score
from tests.emulators.npu.stack import current, lint, require

NAMES = {"scale_value": "scale"}


def npu_prompt_flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, next_tokens: int = 0, **asked: Any
) -> torch.Tensor:
    """The output alone. next_tokens is 0 unless given: with a mask that is causal."""
    require(current().soc != "A5", "npu_prompt_flash_attention is no longer supported")
    mask = asked.get("atten_mask")
    lint(mask is None or not bool(mask.bool().all(-1).any()), "prompt: a row that sees nothing is not supported")
    named = {NAMES.get(name, name): given for name, given in asked.items() if given is not None}
    tensors = (t.contiguous() for t in (query, key, value))
    return npu_fused_infer_attention_score(*tensors, next_tokens=next_tokens, **named)[0]
