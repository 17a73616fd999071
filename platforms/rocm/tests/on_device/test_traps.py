"""What was read in the makers' sources and is worked around here, asked of the device: each test would see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.reference import reference_attention

pytestmark = pytest.mark.rocm

DEVICE = torch.device("cuda")


def drawn(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def attend(backend: str, *tensors: torch.Tensor, **asked: Any) -> Any:
    try:
        return pa.attention(*tensors, backend=backend, **asked)
    except (pa.BackendUnavailable, pa.UnsupportedRequest) as refusal:
        pytest.skip(str(refusal))


def near(out: torch.Tensor, *tensors: torch.Tensor, **asked: Any) -> None:
    want = reference_attention(*(tensor.cpu().double() for tensor in tensors), **asked)
    torch.testing.assert_close(out.cpu().double(), want, atol=2e-2, rtol=0)


@pytest.mark.parametrize("backend", ["aiter", "flash_attn", "flash_attn_triton", "torch_varlen"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_one_query_a_document(backend: str, dim: int) -> None:  # aiter issue 2229
    q, k, v = drawn(3, 8, dim), drawn(1200, 8, dim, seed=1), drawn(1200, 8, dim, seed=2)
    documents = pa.Packed.from_lengths([1, 1, 1], [512, 600, 88])
    near(attend(backend, q, k, v, structure=documents), q, k, v, structure=documents)


@pytest.mark.parametrize("backend", ["flash_attn_triton", "torch_varlen"])
def test_empty_documents_under_causal_leave_the_lse_of_others_alone(backend: str) -> None:
    q = drawn(300, 4, 64)
    documents = pa.Packed.from_lengths([0, 100, 0, 200, 0])
    out, lse = attend(backend, q, q, q, structure=documents, causal=True, return_lse=True)
    near(out, q, q, q, structure=documents, causal=True)
    want = reference_attention(*[q.cpu().double()] * 3, structure=documents, causal=True, return_lse=True)[1]
    torch.testing.assert_close(lse.cpu().double(), want.double(), atol=2e-2, rtol=0)


@pytest.mark.parametrize("backend", ["aiter", "flash_attn"])
def test_keys_of_a_document_without_queries_get_no_gradient(backend: str) -> None:  # flash-attention pull request 2421
    q, k, v = drawn(60, 4, 64), drawn(90, 4, 64, seed=1), drawn(90, 4, 64, seed=2)
    for tensor in (q, k, v):
        tensor.requires_grad_()
    held = [torch.full_like(k, float("nan")) for _ in range(4)]  # what the backward's buffers will lie in
    del held
    out = attend(backend, q, k, v, structure=pa.Packed.from_lengths([20, 0, 40], [30, 30, 30]))
    out.sum().backward()
    for tensor in (k, v):
        assert tensor.grad is not None
        assert tensor.grad[30:60].eq(0).all()
        assert tensor.grad.isfinite().all()


@pytest.mark.parametrize("backend", ["aiter", "torch_varlen", "flash_attn_triton"])
@pytest.mark.parametrize(("queries", "keys"), [(64, 200), (200, 64)])
def test_causal_is_aligned_bottom_right(backend: str, queries: int, keys: int) -> None:
    q, k, v = (
        drawn(1, queries, 4, 128, dtype=torch.bfloat16),
        *(drawn(1, keys, 4, 128, dtype=torch.bfloat16, seed=seed) for seed in (1, 2)),
    )
    near(attend(backend, q, k, v, causal=True), q, k, v, causal=True)
