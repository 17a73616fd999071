"""torch_npu's numbers of dtypes: what an op's integer argument means, and formats that torch has no dtype for."""

from __future__ import annotations

import torch

#: Formats without a dtype of torch's, as attributes of torch_npu; their tensors are bytes.
HIFLOAT8, E8M0, E2M1, E1M2 = 290, 293, 296, 297
NAMED = {"hifloat8": HIFLOAT8, "float8_e8m0fnu": E8M0, "float4_e2m1fn_x2": E2M1, "float4_e1m2fn_x2": E1M2}
#: torch's own numbers, of which torch_npu takes some twice.
_NUMBERS = {
    1: torch.int8, 5: torch.float16, 6: torch.float32, 15: torch.bfloat16, 23: torch.float8_e5m2,
    24: torch.float8_e4m3fn, 291: torch.float8_e5m2, 292: torch.float8_e4m3fn,
}  # fmt: skip


def numbered(dtype: torch.dtype) -> int:
    """The number of a dtype; TypeError where no op of these takes it."""
    for number, known in _NUMBERS.items():
        if known == dtype:
            return number
    raise TypeError(f"(emulator) {dtype} has no number")


def of(number: int) -> torch.dtype | None:
    """The dtype of a number; None for a format that torch has no dtype for."""
    return _NUMBERS.get(number)
