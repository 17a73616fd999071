"""Slots read no tensor on the host: they run on fake tensors, where any read of data raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.vendor import PackedMeta
from polyattn_musa import mate_forward, mudnn

CALL: dict[str, Any] = {"scale": 0.125, "window": None, "softcap": 0.0, "need_lse": False, "options": ()}


def answered(*tensors: torch.Tensor, **given: Any) -> Any:
    """A stand-in of either vendor's function."""
    q = tensors[0] if tensors else given["q"]
    return (torch.empty_like(q), q) if tensors else torch.empty_like(q)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("slot", [mate_forward.packed, mudnn.packed], ids=["mate", "mudnn"])
def test_documents_that_only_the_device_knows(slot: Any, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mate_forward, "operators", lambda: (answered, answered))
    monkeypatch.setattr(mudnn, "_OPERATOR", answered)
    with FakeTensorMode():
        q, k = torch.empty(9, 4, 64).half(), torch.empty(7, 2 if slot is mate_forward.packed else 4, 64).half()
        cu_q, cu_k = (torch.empty(4, dtype=torch.int32) for _ in range(2))
        meta = PackedMeta(cu_q, cu_k, 5, 4, None, None, None)
        out, _ = slot(q, k, k, None, meta=meta, causal=causal, **CALL)
    assert out.shape == q.shape
