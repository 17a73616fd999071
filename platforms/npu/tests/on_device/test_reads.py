"""No slot reads a tensor on the host: the emulated device counts such reads. A real one does not tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.on_device.here import DEVICE, drawn, qkv

pytestmark = [pytest.mark.npu, pytest.mark.emulated]

TABLE, KV_LENGTHS = [[4, 0, 2], [1, 6, -1], [3, -1, -1]], [300, 130, 5]


@pytest.fixture
def reads() -> list[str]:
    device = pytest.importorskip("tests.emulators.npu.device")
    if type(drawn(1)) is torch.Tensor:
        pytest.skip("only the emulated device counts host reads")
    device.host_reads.clear()
    return device.host_reads


CALLS: dict[str, tuple[tuple[int, ...], Any, dict[str, Any]]] = {
    "dense": ((2, 5), lambda: None, {}),
    "causal": ((2, 5), lambda: None, {"causal": True}),
    "window": ((2, 5), lambda: None, {"window": (1, 1)}),
    "host padding": ((2, 5), lambda: pa.KeyPadding.from_lengths([3, 5], 5), {}),
    "host mask": ((2, 5), lambda: pa.Mask.pairs(torch.ones(5, 5).tril().bool()), {}),
    "device mask": ((2, 5), lambda: pa.Mask.pairs(torch.ones(5, 5).tril().bool().to(DEVICE)), {"causal": True}),
    "documents": ((9,), lambda: pa.Packed.from_lengths([2, 3, 2], [1, 3, 4]), {"causal": True}),
    "spans": ((2, 5), lambda: pa.Spans([[(1, 3)], [(0, 2)]]), {}),
}


@pytest.mark.parametrize("backend", ["fusion", "fia"])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_read(reads: list[str], backend: str, name: str) -> None:
    rows, structure, given = CALLS[name]
    tensors = qkv(rows)
    made = structure()
    reads.clear()
    for _ in range(2):
        pa.attention(*tensors, structure=made, backend=backend, return_lse=True, **given)
    assert reads == []


@pytest.mark.parametrize("spans", [None, [[(10, 20)], [], [(0, 5)]]], ids=["pages", "spans over pages"])
def test_nothing_is_read_of_pages(reads: list[str], spans: Any) -> None:
    k, v = drawn(8, 128, 2, 64, seed=1), drawn(8, 128, 2, 64, seed=2)
    q, paged = drawn(3, 4, 4, 64), pa.Paged(TABLE, KV_LENGTHS, None, spans)
    reads.clear()
    pa.attention(q, k, v, structure=paged, causal=True, backend="fia", return_lse=True)
    assert reads == []


def test_nothing_is_read_of_a_bias_and_its_gradients(reads: list[str]) -> None:
    tensors = [t.requires_grad_() for t in qkv((2, 5))]
    bias = pa.Mask(drawn(2, 1, 5, 5))
    reads.clear()
    pa.attention(*tensors, structure=bias, backend="fusion").sum().backward()
    assert reads == []
