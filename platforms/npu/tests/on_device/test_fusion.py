"""npu:fusion on a device: right answers, and that npu_fusion_attention was asked what is intended."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.on_device.here import DEVICE, assert_near, assert_right, drawn, exact, qkv, record, refused

pytestmark = pytest.mark.npu

SCALE = 64**-0.5
DENSE = {"head_num": 4, "input_layout": "BSND", "scale": SCALE}
T, F = True, False


def without_mask(asked: dict) -> dict:
    return {name: value for name, value in asked.items() if name != "atten_mask"}


def is_compressed(mask: torch.Tensor) -> bool:
    return torch.equal(mask.cpu(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))


def test_dense_is_one_plain_call_with_the_scale_as_a_float(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert_right("fusion", *qkv((2, 5), (2, 7)))
    assert_right("fusion", *qkv((2, 5), (2, 7)), scale=1)
    assert asked == [DENSE, DENSE | {"scale": 1.0}]
    assert all(type(call["scale"]) is float for call in asked)


@pytest.mark.parametrize(("queries", "keys", "more"), [(5, 7, {}), (5, 5, {}), (7, 5, {"inner_precise": 2})])
def test_causal_is_mode_3_under_the_compressed_mask(monkeypatch, queries: int, keys: int, more: dict) -> None:
    asked = record(monkeypatch)
    assert_right("fusion", *qkv((2, queries), (2, keys)), causal=True)
    (call,) = asked
    assert without_mask(call) == DENSE | {"sparse_mode": 3} | more
    assert is_compressed(call["atten_mask"])


def test_the_compressed_mask_is_one_tensor_for_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    for keys in (5, 9):
        pa.attention(*qkv((1, 4), (1, keys)), causal=True, backend="fusion")
    assert asked[0]["atten_mask"] is asked[1]["atten_mask"]


def test_a_window_is_mode_4_over_what_some_row_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    q, k, v = qkv((2, 4), (2, 9))
    k[:, :3], v[:, :3] = float("nan"), float("nan")  # before every row's window
    assert_right("fusion", q, k, v, window=(2, 1))
    assert without_mask(asked[0]) == DENSE | {"sparse_mode": 4, "pre_tockens": 2, "next_tockens": 1}
    assert is_compressed(asked[0]["atten_mask"])
    assert_right("fusion", *qkv((2, 9), (2, 4)), window=(1, 2))


@pytest.mark.parametrize(
    ("shape", "taken"), [((1, 1, 1, 7), (1, 1, 5, 7)), ((2, 1, 1, 7), (2, 1, 5, 7)), ((2, 4, 5, 7), (2, 4, 5, 7))]
)
def test_a_mask_is_inverted_and_whole(monkeypatch, shape: tuple[int, ...], taken: tuple[int, ...]) -> None:
    asked = record(monkeypatch)
    keep = torch.rand(shape, generator=torch.Generator().manual_seed(0)) > 0.4
    mask = pa.Mask(keep)
    assert_right("fusion", *qkv((2, 5), (2, 7)), structure=mask)
    pa.attention(*qkv((2, 5), (2, 7)), structure=mask, backend="fusion")
    assert without_mask(asked[0]) == DENSE | {"sparse_mode": 1, "inner_precise": 2}
    assert torch.equal(asked[0]["atten_mask"].cpu(), ~keep.expand(taken))
    assert asked[0]["atten_mask"] is asked[1]["atten_mask"], "made once for all layers"


def test_causal_and_a_keep_mask_are_composed_and_inverted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    keep = torch.tensor([[T, T, F, T, T, T, T], [F, F, F, F, F, F, F]])
    assert_right("fusion", *qkv((2, 5), (2, 7)), structure=pa.Mask.keys(keep), causal=True)
    lower = torch.ones(5, 7, dtype=torch.bool).tril(2)
    assert torch.equal(asked[0]["atten_mask"].cpu(), ~(keep[:, None, None] & lower))
    assert without_mask(asked[0]) == DENSE | {"sparse_mode": 1, "inner_precise": 2}


@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_a_bound_call_moves_a_scale_that_is_not_above_0_into_q(monkeypatch, scale: float) -> None:
    asked = record(monkeypatch)
    q, k, v = qkv((2, 5), (2, 7))
    layer = pa.Attention(4, 64, num_kv_heads=2, scale=scale, causal=True, backend="fusion")
    for _ in range(3):
        assert_near(layer(q, k, v), exact(q, k, v, scale=scale, causal=True))
    assert [call["scale"] for call in asked] == [abs(scale) or 1.0] * 3


def test_documents_are_one_call_by_their_ends_without_the_leading_0(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    packed = pa.Packed.from_lengths([2, 3, 4], [3, 1, 5])
    assert_right("fusion", *qkv((9,)), structure=packed)
    assert asked == [
        {
            "head_num": 4,
            "input_layout": "TND",
            "scale": SCALE,
            "actual_seq_qlen": [2, 5, 9],
            "actual_seq_kvlen": [3, 4, 9],
            "softmax_layout": "TND",
        }
    ]


def test_a_document_with_more_queries_than_keys_is_causal_without_its_fully_masked_rows(monkeypatch) -> None:
    asked = record(monkeypatch)
    out = assert_right("fusion", *qkv((9,)), structure=pa.Packed.from_lengths([2, 3, 4], [3, 1, 5]), causal=True)
    assert (asked[0]["actual_seq_qlen"], asked[0]["actual_seq_kvlen"]) == ([2, 3, 7], [3, 4, 9])
    assert asked[0]["sparse_mode"] == 3
    assert out[2:4].eq(0).all()


def test_empty_documents_and_rows_past_the_last_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    q, k, v = qkv((12,))
    k[7:], v[7:] = float("nan"), float("nan")
    out = assert_right("fusion", q, k, v, structure=pa.Packed.from_lengths([2, 0, 3, 2], [4, 0, 3, 0]))
    assert (asked[0]["actual_seq_qlen"], asked[0]["actual_seq_kvlen"]) == ([2, 5], [4, 7])
    assert out[5:].eq(0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_rows_past_the_documents_are_zero_in_a_buffer_too(causal: bool) -> None:
    q, k, v = qkv((9,))
    buffer = torch.full_like(q, float("nan"))
    structure = pa.Packed.from_lengths([2, 3], [3, 1] if causal else [3, 3])
    assert pa.attention(q, k, v, structure=structure, causal=causal, backend="fusion", out=buffer) is buffer
    assert_near(buffer, exact(q, k, v, structure=structure, causal=causal))
    assert buffer[5:].eq(0).all()


def test_real_and_pad_needs_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert_right("fusion", *qkv((9,)), structure=pa.Packed.real_and_pad(5, 9))
    assert asked[0]["actual_seq_qlen"] == [5]
    assert "atten_mask" not in asked[0]


def test_key_padding_is_packed_and_a_common_prefix_is_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert_right("fusion", *qkv((2, 6)), structure=pa.KeyPadding.from_lengths([4, 2], 6))
    assert asked[0]["actual_seq_qlen"] == asked[0]["actual_seq_kvlen"] == [4, 6]
    assert_right("fusion", *qkv((2, 6)), structure=pa.KeyPadding.from_lengths([4, 4], 6))
    assert asked[1] == DENSE


def test_spans_are_pieces_of_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert_right("fusion", *qkv((1, 8)), structure=pa.Spans([[(2, 5)]]))
    assert [call.get("sparse_mode", 0) for call in asked] == [3, 0, 3]


def test_gradients_are_the_op_s_own() -> None:
    tensors = [t.float().requires_grad_() for t in qkv((2, 5), (2, 7))]
    out = pa.attention(*tensors, causal=True, backend="fusion")
    upstream = drawn(*out.shape, dtype=torch.float32, seed=5)
    out.backward(upstream)
    leaves = [t.detach().cpu().double().requires_grad_() for t in tensors]
    exact_out = pa.reference_attention(*leaves, causal=True)
    exact_out.backward(upstream.cpu().double())
    for tensor, leaf in zip(tensors, leaves, strict=True):
        assert_near(tensor.grad, leaf.grad)


def test_a_buffer_is_written_and_returned() -> None:
    q, k, v = qkv((2, 5), (2, 7))
    buffer = torch.full((2, 5, 4, 64), float("nan"), dtype=q.dtype, device=DEVICE)
    assert pa.attention(q, k, v, backend="fusion", out=buffer) is buffer
    assert_near(buffer, exact(q, k, v))


def test_values_may_be_narrower_and_not_wider() -> None:
    q, k, v = qkv((2, 5))
    assert_right("fusion", q, k, v[..., :32])
    assert "value head_dim 64 is larger than the 32" in refused("fusion", q[..., :32], k[..., :32], v)


def test_boundaries_that_only_the_device_knows_are_refused_with_the_way_out() -> None:
    boundaries = torch.tensor([0, 2, 5], dtype=torch.int32).to(DEVICE)
    reasons = refused("fusion", *qkv((5,)), structure=pa.Packed.from_cu_seqlens(boundaries, max_q=3))
    assert "host integers" in reasons
    assert "check=True" in reasons
    keep = torch.ones(2, 5, dtype=torch.bool).to(DEVICE)
    assert "check=True" in refused("fusion", *qkv((2, 5)), structure=pa.KeyPadding.from_mask(keep))


def test_what_the_op_lacks_is_refused_by_name() -> None:
    assert "softcap" in refused("fusion", *qkv((2, 5)), softcap=1.5)
    assert "head_dim 576" in refused("fusion", *qkv((1, 2), dim=576))
    assert "deterministic" in refused("fusion", *qkv((2, 5)), deterministic=True)
    assert "257 query heads" in refused("fusion", *qkv((1, 2), heads=257, kv_heads=257))
