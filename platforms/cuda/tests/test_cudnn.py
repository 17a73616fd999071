"""cudnn: what torch's cuDNN operator gets from us, and what we make of its answers, over its emulation on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polyattn import Mask, reference_attention
from polyattn.vendor import Accepted, Machine, Rejected, Request, StructureFacts, TensorFacts, resolve
from polyattn_cuda import cudnn
from tests.emulators.cuda import aten_cudnn

pytestmark = pytest.mark.emulated

H200 = Machine("cuda", "cuda", arch="sm_90", versions={"torch": "2.11.0+cu130"})
CALL: dict[str, Any] = {"causal": False, "scale": 0.125, "window": None, "softcap": 0.0, "need_lse": True}


@pytest.fixture(scope="module", autouse=True)
def torch_has_cudnn() -> None:
    aten_cudnn.install()


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def decision(queries: int, keys: int, kind: str = "dense", machine: Machine = H200, **facts: Any) -> Any:
    q, k = (TensorFacts.contiguous((1, rows, 2, 64), "bfloat16") for rows in (queries, keys))
    asked = Request(q, k, k, device="cuda:0", structure_kind=kind, scale=0.125, **facts)
    return resolve(asked, machine, [cudnn.backend()])[0]


def dense(q, k, v, **call):
    return cudnn.dense(q, k, v, None, meta=None, options=(), **CALL | call)


def masked(q, k, v, tensor, **call):
    meta = Mask(tensor).bind(torch.device("cpu"), tuple(q.shape), tuple(k.shape))
    return cudnn.mask(q, k, v, None, meta=meta, options=(), **CALL | call)


def close(found, expected, atol=2e-2):
    torch.testing.assert_close(found.double(), expected.double(), atol=atol, rtol=0)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8), (8, 3), (4, 1), (1, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_dense_at_any_lengths(queries, keys, causal):
    q, k, v = drawn(2, queries, 4, 64), drawn(2, keys, 2, 64), drawn(2, keys, 2, 64)
    out, lse = dense(q, k, v, causal=causal)
    expected, expected_lse = reference_attention(q, k, v, causal=causal, scale=0.125, return_lse=True)
    close(out, expected)
    close(lse, expected_lse)


def test_causal_of_other_lengths_is_another_backends():
    assert isinstance(decision(8, 8, causal=True), Accepted)
    answer = decision(4, 8, causal=True)
    assert isinstance(answer, Rejected)
    assert "Sq=4 and Sk=8" in answer.reasons[0]


@pytest.mark.parametrize("scale", [-0.2, 0.0])
def test_a_scale_that_is_not_positive(scale):
    q = drawn(1, 5, 2, 64)
    out, lse = dense(q, q, q, causal=True, scale=scale)
    expected, expected_lse = reference_attention(q, q, q, causal=True, scale=scale, return_lse=True)
    close(out, expected)
    close(lse, expected_lse)


@pytest.mark.parametrize("additive", [False, True])
def test_a_row_that_sees_nothing_is_zero(additive):
    q, k = drawn(1, 3, 2, 64), drawn(1, 5, 2, 64)
    keep = torch.ones(1, 3, 5, dtype=torch.bool)
    keep[0, 1] = False
    keep[0, 2, 3:] = False
    given = torch.zeros(keep.shape).masked_fill(~keep, -torch.inf) if additive else keep
    out, lse = masked(q, k, k, given)
    expected, expected_lse = reference_attention(q, k, k, structure=Mask(given), scale=0.125, return_lse=True)
    assert out[0, 1].eq(0).all()
    assert lse[0, :, 1].eq(-torch.inf).all()
    close(out, expected)
    close(lse, expected_lse)


def test_a_mask_reaches_cudnn_in_its_dtype_with_aligned_rows(monkeypatch):
    seen = []

    def operator(*tensors, attn_bias, **asked):
        seen.append(attn_bias)
        return aten_cudnn.forward(*tensors, attn_bias, **asked)

    monkeypatch.setattr(cudnn, "_OPERATOR", operator)
    q, k = drawn(1, 3, 2, 64), drawn(1, 5, 2, 64)
    masked(q, k, k, torch.zeros(1, 1, 1, 5))
    (bias,) = seen
    assert bias.dtype == torch.bfloat16
    assert bias.shape == (1, 1, 3, 5)
    assert all(step % 8 == 0 for step in bias.stride()[:-1])


def test_gradients_come_without_a_mask_alone():
    assert isinstance(decision(8, 8, grad=True), Accepted)
    mask = StructureFacts(mask_shape=(1, 1, 8, 8), mask_dtype="bool")
    assert isinstance(decision(8, 8, "mask", structure_facts=mask), Accepted)
    assert isinstance(decision(8, 8, "mask", grad=True, structure_facts=mask), Rejected)
    assert isinstance(decision(8, 8, lse=True, grad=True), Rejected)


@pytest.mark.parametrize(("queries", "keys"), [(6, 6), (3, 8), (4, 1)])
def test_gradients_are_those_of_the_reference(queries, keys):
    q, k, v = (drawn(1, rows, 2, 64).requires_grad_() for rows in (queries, keys, keys))
    out, _ = dense(q, k, v, causal=True, need_lse=False)
    wanted = reference_attention(q, k, v, causal=True, scale=0.125)
    down = drawn(1, queries, 2, 64)
    found, expected = (torch.autograd.grad(answer, (q, k, v), down.to(answer.dtype)) for answer in (out, wanted))
    for got, right in zip(found, expected, strict=True):
        close(got, right, atol=5e-2)


def test_no_process_global_switch_is_touched():
    before = (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled())
    dense(*[drawn(1, 4, 2, 64)] * 3)
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()) == before


def test_tensors_out_of_its_reach_are_copied():
    wide = drawn(1, 6, 2, 128)
    stepped, repeated = wide[..., ::2], drawn(1, 6, 1, 64).expand(1, 6, 2, 64)
    out, _ = dense(stepped, repeated, repeated)
    close(out, reference_attention(stepped, repeated, repeated, scale=0.125))


def test_an_architecture_without_code_is_a_reason():
    answer = decision(8, 8, machine=Machine("cuda", "cuda", arch="sm_75"))
    assert isinstance(answer, Rejected)
    assert "sm_75" in answer.reasons[0]
