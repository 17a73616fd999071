"""npu_prompt_flash_attention's stand-in: its causal default, its lint and the chip that lost it."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from tests.emulators.npu.prompt import npu_prompt_flash_attention as prompt
from tests.emulators.npu.stack import LintError, using

pytestmark = pytest.mark.emulated

Q = torch.randn(1, 4, 2, 16, generator=torch.Generator().manual_seed(0)).half()
ASKED = {"num_heads": 2, "scale_value": 0.2, "input_layout": "BSND"}


def test_with_a_mask_it_is_causal_unless_next_tokens_says_otherwise() -> None:
    mask = torch.zeros(4, 4, dtype=torch.bool)
    causal, full = (pa.reference_attention(Q, Q, Q, causal=c, scale=0.2) for c in (True, False))
    torch.testing.assert_close(prompt(Q, Q, Q, atten_mask=mask, **ASKED).double(), causal, atol=2e-3, rtol=0)
    wide = prompt(Q, Q, Q, atten_mask=mask, next_tokens=2147483647, **ASKED)
    torch.testing.assert_close(wide.double(), full, atol=2e-3, rtol=0)


def test_refusals() -> None:
    with pytest.raises(RuntimeError, match="float16 or bfloat16"):
        prompt(Q.float(), Q.float(), Q.float(), **ASKED)
    with using(soc="A5"), pytest.raises(RuntimeError, match="no longer supported"):
        prompt(Q, Q, Q, **ASKED)
    with using(lint=True), pytest.raises(LintError, match="sees nothing"):
        prompt(Q, Q, Q, atten_mask=torch.ones(4, 4, dtype=torch.bool), **ASKED)
