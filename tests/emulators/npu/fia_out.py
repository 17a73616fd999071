"""npu_fused_infer_attention_score into the caller's buffers, both versions, and the workspace that they take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.emulators.npu.fia import npu_fused_infer_attention_score, npu_fused_infer_attention_score_v2
from tests.emulators.npu.stack import require


def npu_fused_infer_attention_score_out(
    attention_out: torch.Tensor, softmax_lse: torch.Tensor, workspace: torch.Tensor | None = None, **asked: Any
) -> None:
    """The first version."""
    _write(npu_fused_infer_attention_score, asked, (attention_out, softmax_lse))


def npu_fused_infer_attention_score_v2_out(
    attention_out: torch.Tensor, softmax_lse: torch.Tensor, workspace: torch.Tensor | None = None, **asked: Any
) -> None:
    """The second version."""
    _write(npu_fused_infer_attention_score_v2, asked, (attention_out, softmax_lse))


def workspace(query: torch.Tensor, *tensors: torch.Tensor, **asked: Any) -> torch.Tensor:
    """A buffer of a size that means nothing outside the device."""
    return query.new_empty((1,), dtype=torch.uint8)


def _write(op: Callable[..., Any], asked: dict[str, Any], buffers: tuple[torch.Tensor, ...]) -> None:
    """RuntimeError for a buffer of another shape or dtype: these overloads resize nothing."""
    out, lse = op(**asked)
    wanted = lse if asked.get("softmax_lse_flag") or asked.get("return_softmax_lse") else None
    for name, buffer, answer in (("attention_out", buffers[0], out), ("softmax_lse", buffers[1], wanted)):
        if answer is None:
            continue
        fits = buffer.shape == answer.shape and buffer.dtype == answer.dtype
        require(fits, f"{name} is {buffer.dtype} {tuple(buffer.shape)}, not {answer.dtype} {tuple(answer.shape)}")
        buffer.copy_(answer)
