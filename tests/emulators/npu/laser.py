"""MindIE-SD's laser attention (`mindiesd::la`): float16 all the way, unscaled scores stored in it, no mask."""

from __future__ import annotations

import torch

from tests.emulators.npu.calls import mask_of_caller
from tests.emulators.npu.stack import current, lint, require_op

OP = "aclnnLaserAttention"
#: The rows of a block, to which the caller pads.
BLOCK = 256
#: The head dim that the kernel takes as given.
DIM = 128
LONGEST = 128 * 1024
#: The score of the padded keys, before the scale.
TAIL = -60000.0


def la(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, atten_mask: torch.Tensor | None = None,
    alibi_mask: torch.Tensor | None = None, drop_mask: torch.Tensor | None = None, scale_value: float = 1.0,
    head_num: int = 2, input_layout: str = "BNSD", keep_prob: float = 1.0, pre_tokens: int = 2147483647,
    next_tokens: int = 1, is_highPrecision: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(statistics, out float32 [B,N,S,D]). `pre_tokens` below a block's rows is the number of padded keys."""
    require_op(current().soc in ("A2", "A3"), OP, f"not on {current().soc}")
    require_op(input_layout == "BNSD" and query.dim() == 4, OP, f"layout {input_layout} is not BNSD", 161002)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        require_op(tensor.dtype == torch.float16, OP, f"{name} is {tensor.dtype}, not float16", 161002)
        require_op(tensor.shape[3] == DIM, OP, f"(emulator) {name} has head dim {tensor.shape[3]}, not {DIM}")
        length = tensor.shape[2]
        require_op(length % BLOCK == 0 and BLOCK <= length <= LONGEST, OP, f"{name} has {length} rows")
        lint(tensor.is_contiguous(), f"la: {name} is not contiguous")
    require_op(query.shape[1] == head_num and head_num % key.shape[1] == 0, OP, "head_num", 161002)
    lint(scale_value > 0, f"la: scale {scale_value} lifts the keys that are not there")
    lint(not mask_of_caller(), "la: attention_forward drops attn_mask")
    lint(atten_mask is None and alibi_mask is None and drop_mask is None, "la ignores masks")
    group = head_num // key.shape[1]
    k, v = (t.repeat_interleave(group, 1) for t in (key, value))
    out = torch.stack([_batch_row(*row, scale_value, pre_tokens) for row in zip(query, k, v, strict=True)])
    return query.new_zeros(query.shape[:3], dtype=torch.float32), out.float()


def _batch_row(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, pre_tokens: int) -> torch.Tensor:
    """[N,S,D]. A score beyond float16 is infinite, and its row NaN."""
    scores = (q.double() @ k.double().transpose(1, 2)).half()
    lint(bool(scores.isfinite().all()), "la: an unscaled score is beyond float16")
    if pre_tokens < BLOCK:
        scores[..., k.shape[1] - pre_tokens :] = TAIL
    scaled = scores.double() * scale
    weights = (scaled - scaled.amax(-1, keepdim=True)).exp()
    return (weights / weights.sum(-1, keepdim=True)) @ v.double()
