"""Slots read no tensor on the host: they run on fake tensors, where any read of data raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn.vendor import PackedMeta
from polyattn_xpu import vllm_xpu_forward

CALL: dict[str, Any] = {"scale": 0.125, "window": None, "softcap": 0.0, "options": ()}


def answered(**given: Any) -> Any:
    """A stand-in of the package's function."""
    out = given["out"]
    return (out, out.new_empty(out.shape[1], out.shape[0])) if given["return_softmax_lse"] else out


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_xpu_forward, "operator", lambda: answered)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("need_lse", [False, True])
def test_documents_that_only_the_device_knows(causal: bool, need_lse: bool) -> None:
    with FakeTensorMode():
        q, k = torch.empty(9, 4, 64).half(), torch.empty(7, 2, 64).half()
        cu_q, cu_k = (torch.empty(4, dtype=torch.int32) for _ in range(2))
        meta = PackedMeta(cu_q, cu_k, 5, 4, None, None, None)
        out, lse = vllm_xpu_forward.packed(q, k, k, None, meta=meta, causal=causal, need_lse=need_lse, **CALL)
    assert out.shape == q.shape
    assert (lse is not None) == need_lse


@pytest.mark.parametrize(("queries", "keys"), [(4, 4), (3, 6), (6, 3)])
def test_dense_calls(queries: int, keys: int) -> None:
    with FakeTensorMode():
        q, k = torch.empty(2, queries, 4, 80).half(), torch.empty(2, keys, 4, 80).half()
        out, _ = vllm_xpu_forward.dense(q, k, k, None, meta=None, causal=True, need_lse=False, **CALL)
    assert out.shape == q.shape
