"""Scenes of the real MindIE-SD 3.1.0: what it refuses, by chip and mode, and what it loses that lint mode finds."""

from __future__ import annotations

import os
import re

import pytest
import torch

from tests.emulators.npu import registry, stack


def _qkv(rows: int = 5, heads: int = 4, dtype: torch.dtype = torch.float16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, rows, heads, 64, dtype=dtype).npu() for _ in range(3)]


def refusals() -> None:
    """Every documented class of error, none of them a ValueError."""
    import mindiesd
    from mindiesd.utils.exception import ParametersInvalid

    assert not issubclass(ParametersInvalid, (ValueError, RuntimeError))
    q, k, v = _qkv()
    forward, varlen = mindiesd.attention_forward, mindiesd.attention_forward_varlen

    def refused(call, *tensors, **asked) -> None:
        with pytest.raises(ParametersInvalid, match=re.escape("[MIE06E000001] Parameters invalid.")):
            call(*tensors, **asked)

    manual = {"opt_mode": "manual"}
    for asked in (
        {"fused": 1}, {"attn_mask": [1]}, {"scale": 1}, {"scale": torch.tensor(1.0)}, manual | {"op_type": "fa"},
        manual | {"layout": "SBH"}, manual | {"layout": "TND"}, {"opt_mode": "fast"},
        manual | {"op_type": "prompt_flash_attn", "layout": "TND"},
    ):  # fmt: skip
        refused(forward, q, k, v, **asked)
    refused(forward, q[0], k, v)
    refused(forward, q, k, v.tolist())
    refused(forward, *_qkv(dtype=torch.float32), **manual, op_type="prompt_flash_attn")
    rows = [t[0] for t in (q, k, v)]
    for name, value in (
        ("max_seqlen_q", 5), ("max_seqlen_k", 5), ("window_size", (-1, -1)), ("softcap", 0.0), ("alibi_slopes", 0),
        ("deterministic", False), ("return_attn_probs", False), ("block_table", 0), ("dropout_p", 0.1),
    ):  # fmt: skip
        refused(varlen, *rows, [0, 5], [0, 5], **{name: value})
    refused(varlen, q, k, v, [0, 5], [0, 5])
    with pytest.raises((RuntimeError, TypeError)):
        varlen(*rows, torch.tensor([0, 5], dtype=torch.int32).npu(), torch.tensor([0, 5], dtype=torch.int32).npu())
    half = k[:, :, :2]
    forward(q, half, half, **manual, layout="BNSD")
    with pytest.raises(RuntimeError):
        forward(q, half, half, **manual, layout="BSH")
    with pytest.raises(RuntimeError):
        forward(q, half, half, fused=False)
    _forced_laser(forward, ParametersInvalid)


def _forced_laser(forward, invalid: type[Exception]) -> None:
    """The variable overrides the op in manual mode alone; laser takes BNSD alone, and only from 2048 rows on."""
    os.environ["MINDIE_SD_FA_TYPE"] = "ascend_laser_attention"
    try:
        short, long = _qkv(), _qkv(2048, 1)
        forward(*short, opt_mode="manual", layout="BSND")
        assert registry.calls[-1].op == "npu::npu_fusion_attention"
        forward(*long, opt_mode="manual", layout="BNSD")
        assert registry.calls[-1].op == "mindiesd::la"
        forward(*long, opt_mode="static")
        assert registry.calls[-1].op == "npu::npu_fusion_attention"
        with pytest.raises(invalid, match="layout"):
            forward(*long, opt_mode="manual", layout="BSND")
        os.environ["MINDIE_SD_FA_TYPE"] = "no_such"
        with pytest.raises(invalid):
            forward(*short, opt_mode="manual")
    finally:
        del os.environ["MINDIE_SD_FA_TYPE"]


def lint() -> None:
    """What the package turns into a wrong answer before an op could see it."""
    import mindiesd

    long, mask = _qkv(2048, 1), torch.ones(2048, 2048, dtype=torch.bool).npu()
    asked = {"opt_mode": "manual", "op_type": "ascend_laser_attention"}
    with pytest.raises(stack.LintError, match="drops attn_mask"):
        mindiesd.attention_forward(*long, attn_mask=mask, **asked)
    short = _qkv()
    bias = torch.zeros(5, 5, dtype=torch.float16).npu()
    with pytest.raises(stack.LintError, match="floating"):
        mindiesd.attention_forward(*short, attn_mask=bias, opt_mode="manual")
    mindiesd.attention_forward(*short, opt_mode="runtime")
    assert any("runtime" in words for words in stack.lints)
    with stack.using(lint=False):
        out = mindiesd.attention_forward(*long, attn_mask=~mask, **asked)
        assert torch.equal(out.cpu(), mindiesd.attention_forward(*long, **asked).cpu())
