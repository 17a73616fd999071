"""What the flash kernel's tests draw, want and compare."""

from __future__ import annotations

import math
from typing import Any

import torch

import polyattn as pa

NAN, INF = math.nan, math.inf
TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
Result = tuple[torch.Tensor, torch.Tensor]


def random(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def unwritten(q: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.full((*q.shape[:-1], v.shape[-1]), NAN, dtype=q.dtype, device=q.device)


def wanted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **call: Any) -> Result:
    wanted: Result = pa.reference_attention(*(t.detach().cpu().double() for t in (q, k, v)), return_lse=True, **call)
    return wanted


def agree(got: tuple[torch.Tensor, torch.Tensor | None], want: Result, dtype: torch.dtype) -> None:
    out, lse = got
    assert lse is not None
    assert lse.dtype == torch.float32
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.cpu().double(), want[0], atol=tolerance, rtol=0)
    torch.testing.assert_close(lse.cpu().double(), want[1].double(), atol=max(tolerance, 1e-4), rtol=0)
