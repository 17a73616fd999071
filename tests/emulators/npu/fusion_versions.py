"""npu_fusion_attention_v2 and _v3 with their gradients: other names and kinds of arguments, the first one's answers."""

from __future__ import annotations

from typing import Any

import torch

from tests.emulators.npu import fusion
from tests.emulators.npu.stack import require, require_op

#: The second version's spelling -> the first one's.
SPELT = {"pre_tokens": "pre_tockens", "next_tokens": "next_tockens"}
OP = "aclnnFlashAttentionScoreV2"
#: Kinds of bias that the kernel builds itself from slopes.
SLOPES = (2, 3)


def npu_fusion_attention_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, **named: Any
) -> fusion.Seven:
    """The first one's seven; all but the tensors, head_num and input_layout by name."""
    asked = _asked_v2(query, key, head_num, named)
    return fusion.forward(query, key, value, asked | {"head_num": head_num, "input_layout": input_layout})


def npu_fusion_attention_grad_v2(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str,
    *, scale_value: float = 1.0, **named: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """(dq, dk, dv, dpse, gradients of the two rope tensors, and in releases that have a sink its gradient)."""
    asked = _asked_v2(query, key, head_num, named)
    grads = fusion.npu_fusion_attention_grad(
        query, key, value, dy, head_num, input_layout, scale_value=scale_value, **asked
    )
    return (*grads[:4], None, None, grads[4])


def npu_fusion_attention_v3(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, head_num: int, input_layout: str, *rest: Any,
    **named: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(attention_out, softmax_max, softmax_sum, softmax_out, seed, offset): tensors all, no count of elements."""
    asked = dict(zip(fusion.DEFAULTS, rest, strict=False)) | named
    *tensors, seed, offset, _ = fusion.npu_fusion_attention(
        query, key, value, head_num, input_layout, **_asked_v3(asked)
    )
    out, maximum, total, softmax = tensors
    return out, maximum, total, softmax, torch.tensor([seed]), torch.tensor([offset])


def npu_fusion_attention_grad_v3(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dy: torch.Tensor, head_num: int, input_layout: str,
    *, seed: torch.Tensor | None = None, offset: torch.Tensor | None = None, **named: Any,
) -> fusion.Five:  # fmt: skip
    """The first one's five."""
    drawn = {name: int(t) for name, t in (("seed", seed), ("offset", offset)) if t is not None}
    return fusion.npu_fusion_attention_grad(query, key, value, dy, head_num, input_layout, **_asked_v3(named), **drawn)


def _asked_v2(query: torch.Tensor, key: torch.Tensor, head_num: int, named: dict[str, Any]) -> dict[str, Any]:
    asked = fusion.DEFAULTS | {"pse_type": 1} | {SPELT.get(name, name): value for name, value in named.items()}
    kind, pse, ropes = asked["pse_type"], asked["pse"], [asked.pop("query_rope", None), asked.pop("key_rope", None)]
    require(kind in (0, 1, *SLOPES), f"pse_type {kind} is not in 0..3")
    starts = [asked.pop(name, None) for name in ("q_start_idx", "kv_start_idx")]
    if any(rope is not None for rope in ropes):
        require_op(kind == 1, OP, "query_rope and key_rope are for pse_type 1 only", 161002)
        require_op(all(rope is not None for rope in ropes), OP, "query_rope and key_rope come together", 161001)
        raise NotImplementedError("(emulator) query_rope and key_rope are not emulated")
    if kind in SLOPES:
        fits = pse is not None and pse.dtype == torch.float32 and tuple(pse.shape[-1:]) == (head_num,)
        require_op(fits and pse.dim() in (1, 2), OP, f"pse_type {kind} takes slopes, float32 [B,N] or [N]", 161002)
        require_op(query.shape == key.shape or query.dim() == 3, OP, f"pse_type {kind} takes as many keys as queries")
        raise NotImplementedError(f"(emulator) pse_type {kind}: how the kernel builds its bias is not known {starts}")
    return asked


def _asked_v3(asked: dict[str, Any]) -> dict[str, Any]:
    """With lists in the place of its length tensors; RuntimeError for a length tensor that it does not take."""
    lists = {}
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        ends = asked.get(name)
        if ends is None:
            continue
        require(ends.device.type == "cpu", f"{name} must be on the CPU, got {ends.device}")
        require(ends.dim() == 1, f"{name} must be 1-D, got {ends.dim()}-D")
        require(not ends.dtype.is_floating_point and ends.dtype != torch.bool, f"{name} must be integers: {ends.dtype}")
        lists[name] = ends.tolist()
    return asked | lists
