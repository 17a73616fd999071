"""How flex's tests draw tensors, call a slot and compare."""

from __future__ import annotations

from typing import Any

import torch

CALL: dict[str, Any] = {"scale": 0.125, "softcap": 0.0, "need_lse": True, "options": ()}


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def attend(slot: Any, q: torch.Tensor, k: torch.Tensor, structure: Any = None, **call: Any) -> Any:
    meta = None if structure is None else structure.bind(q.device, tuple(q.shape), tuple(k.shape))
    return slot(q, k, k, None, meta=meta, **{"causal": False, "window": None, **CALL, **call})


def close(found: torch.Tensor, expected: torch.Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=0)
