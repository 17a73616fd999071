"""The second and third version of npu_fusion_attention, and dropout, on plain tensors."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from tests.emulators.npu.fusion import npu_fusion_attention as first
from tests.emulators.npu.fusion import npu_fusion_attention_grad
from tests.emulators.npu.fusion_versions import npu_fusion_attention_v2 as second
from tests.emulators.npu.fusion_versions import npu_fusion_attention_v3 as third

pytestmark = pytest.mark.emulated

Q, K, V = (torch.randn(2, n, 4, 32, generator=torch.Generator().manual_seed(n)) for n in (5, 7, 7))
CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def test_they_answer_as_the_first_one_does() -> None:
    asked = {"scale": 0.3, "atten_mask": CAUSAL, "sparse_mode": 4}
    one = first(Q, K, V, 4, "BSND", pre_tockens=2, next_tockens=1, **asked)
    two = second(Q, K, V, 4, "BSND", pre_tokens=2, next_tokens=1, **asked)
    three = third(Q, K, V, 4, "BSND", pre_tockens=2, next_tockens=1, **asked)
    for a, b, c in zip(one[:3], two[:3], three[:3], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert (len(one), len(two), len(three)) == (7, 7, 6)
    assert (two[4:], [t.tolist() for t in three[4:]]) == ((0, 0, 0), [[0], [0]])


def test_a_bias_of_type_0_is_added_after_the_scale() -> None:
    bias = torch.randn(2, 4, 5, 7, generator=torch.Generator().manual_seed(0))
    want = pa.reference_attention(Q, K, V, structure=pa.Mask(bias.double()), scale=0.3)
    got = second(Q, K, V, 4, "BSND", scale=0.3, pse=bias, pse_type=0)[0]
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    scaled = second(Q, K, V, 4, "BSND", scale=0.3, pse=bias / 0.3)[0]
    torch.testing.assert_close(got, scaled, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        ("pse_type 4", {"pse_type": 4}),
        ("takes slopes", {"pse_type": 2}),
        ("takes slopes", {"pse_type": 3, "pse": torch.zeros(3)}),
        ("as many keys as queries", {"pse_type": 2, "pse": torch.zeros(4)}),
        ("for pse_type 1 only", {"pse_type": 0, "query_rope": Q, "key_rope": K}),
        ("come together", {"query_rope": Q}),
        ("head_num", {"sparse_mode": 9}),
    ],
)
def test_the_second_refuses(words: str, asked: dict) -> None:
    heads = 0 if words == "head_num" else 4
    with pytest.raises(RuntimeError, match=words):
        second(Q, K, V, heads, "BSND", **asked)


@pytest.mark.parametrize(
    ("words", "ends"),
    [("must be 1-D", torch.tensor([[5]])), ("must be integers", torch.tensor([5.0])), ("Query T", torch.tensor([6]))],
)
def test_the_third_takes_lengths_as_tensors_of_one_axis(words: str, ends: torch.Tensor) -> None:
    rows = Q[0]
    with pytest.raises(RuntimeError, match=words):
        third(rows, rows, rows, 4, "TND", actual_seq_qlen=ends, actual_seq_kvlen=torch.tensor([5]))


def test_dropout_keeps_its_share_scales_it_up_and_is_the_same_in_the_gradient() -> None:
    q = torch.zeros(1, 400, 1, 8)
    v = torch.eye(400)[None, :, None].float()
    wide = torch.nn.functional.pad(q, (0, 392))
    out, maximum, total, _, seed, offset, numels = first(wide, wide, v, 1, "BSND", keep_prob=0.75)
    kept = out[0, :, 0] != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.01)
    torch.testing.assert_close(out[0, :, 0][kept], torch.full_like(out[0, :, 0][kept], 1 / 400 / 0.75))
    assert numels == 400 * 400
    again = first(wide, wide, v, 1, "BSND", keep_prob=0.75)
    assert not torch.equal(again[0], out)
    given = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out, "seed": seed, "offset": offset}
    ones = torch.eye(400)[None, :, None].float()
    dv = npu_fusion_attention_grad(wide, wide, v, ones, 1, "BSND", keep_prob=0.75, **given)[2]
    torch.testing.assert_close(dv[0, :, 0], out[0, :, 0].T)
