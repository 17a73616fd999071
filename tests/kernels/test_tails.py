"""Strange values behind documents: they are found, and what they spoiled is computed anew, and nothing else."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from polyattn.kernels.tails import repair_documents, repair_samples, strange_tails

SCORING = (False, 0.25, None, 0.0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_only_the_documents_with_strange_values_behind_them_are_marked(device, dtypes, value):
    for dtype in dtypes:
        v = torch.randn(40, 2, 16, device=device, dtype=dtype)
        v[14, 1, 3] = value
        v[39, 0, 15] = value
        ends = torch.tensor([5, 14, 30, 40], device=device, dtype=torch.int32)
        assert strange_tails(v.unsqueeze(0), ends, 9).tolist() == [0, 1, 0, 0]
        assert strange_tails(v.unsqueeze(0), ends, 10).tolist() == [1, 1, 1, 0]


def test_samples_of_a_padded_batch_have_their_own_rows(device):
    v = torch.zeros(3, 20, 3, 40, device=device)
    v[1, 19] = float("nan")
    v[2, 0] = float("nan")
    ends = torch.tensor([7, 12, 1], device=device, dtype=torch.int32)
    assert strange_tails(v, ends, 256).tolist() == [0, 1, 0]


def test_a_strided_tensor_is_read_where_it_lies(device):
    v = torch.zeros(12, 4, 32, device=device).transpose(0, 1)[:, ::2, ::2]
    v[3, 5, 15] = float("nan")
    ends = torch.tensor([2, 4], device=device, dtype=torch.int32)
    assert strange_tails(v.unsqueeze(0), ends, 8).tolist() == [1, 0]


@pytest.mark.parametrize("causal", [False, True])
def test_spoiled_documents_are_computed_anew_and_the_others_keep_what_they_have(device, causal):
    q, k, v = (torch.randn(24, 2, 16, device=device) for _ in range(3))
    v[11] = float("nan")
    cu = torch.tensor([0, 4, 11, 24], device=device, dtype=torch.int32)
    out, lse = torch.full_like(q, 7.0), torch.full((2, 24), 7.0, device=device)
    repair_documents(
        q, k, v, out, lse, (causal, 0.25, None, 0.0), cu_q=cu, cu_k=cu, max_q=13, reach=3
    )  # fmt: skip
    want, want_lse = pa.reference_attention(
        q[4:11].cpu()[None], k[4:11].cpu()[None], v[4:11].cpu()[None], causal=causal, scale=0.25, return_lse=True
    )
    torch.testing.assert_close(out[4:11].cpu(), want[0].float(), atol=2e-6, rtol=0)
    torch.testing.assert_close(lse[:, 4:11].cpu(), want_lse[0].float(), atol=2e-6, rtol=0)
    assert bool((out[:4] == 7.0).all() & (out[11:] == 7.0).all() & (lse[:, :4] == 7.0).all())


def test_spoiled_samples_are_computed_anew_with_their_padding(device):
    q, k, v = (torch.randn(2, 12, 2, 16, device=device) for _ in range(3))
    v[1, 7:] = float("inf")
    used = torch.tensor([5, 7], device=device, dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    repair_samples(q, k, v, out, None, SCORING, used_q=used, used_k=used, reach=256)
    want = pa.reference_attention(q[1:, :7].cpu(), k[1:, :7].cpu(), v[1:, :7].cpu(), scale=0.25)
    torch.testing.assert_close(out[1:, :7].cpu(), want.float(), atol=2e-6, rtol=0)
    assert bool((out[0] == 7.0).all() & (out[1, 7:] == 0.0).all())
