"""npu:fia on a device: right answers, and that npu_fused_infer_attention_score was asked what is intended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import polyattn as pa
from platforms.npu.tests.on_device.here import (
    DEVICE,
    assert_near,
    assert_right,
    drawn,
    exact,
    qkv,
    record,
    refused,
)
from polyattn_npu import cann

pytestmark = pytest.mark.npu

DENSE = {
    "num_heads": 4, "num_key_value_heads": 2, "input_layout": "BSND", "scale": 64**-0.5, "softmax_lse_flag": True,
}  # fmt: skip
PAGE = 128
KV_LENGTHS = [300, 130, 5]
TABLE = [[4, 0, 2], [1, 6, -1], [3, -1, -1]]


def without_mask(asked: dict) -> dict:
    return {name: value for name, value in asked.items() if name not in ("atten_mask", "block_table")}


def pools(kv_heads: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Contiguous pools [pages,page_size,Hk,D]."""
    return drawn(8, PAGE, kv_heads, 64, seed=1), drawn(8, PAGE, kv_heads, 64, seed=2)


def test_dense_is_one_plain_call_with_contiguous_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    q, k, v = qkv((2, 5), (2, 7))
    assert_right("fia", q, k, v)
    assert_right("fia", q, k.transpose(1, 2).contiguous().transpose(1, 2), v)
    assert asked == [DENSE, DENSE]


@pytest.mark.parametrize(("queries", "keys", "more"), [(5, 7, {}), (7, 5, {"inner_precise": 2})])
def test_causal_is_mode_3_under_the_compressed_mask(monkeypatch, queries: int, keys: int, more: dict) -> None:
    asked = record(monkeypatch)
    assert_right("fia", *qkv((2, queries), (2, keys)), causal=True)
    assert without_mask(asked[0]) == DENSE | {"sparse_mode": 3} | more
    assert tuple(asked[0]["atten_mask"].shape) == (2048, 2048)


def test_one_query_is_the_decode_kernel_s_which_reads_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert_right("fia", *qkv((2, 1), (2, 7)), causal=True)
    assert_right("fia", *qkv((2, 1), (2, 7)), window=(2, 0))
    assert asked == [DENSE, DENSE]


def test_a_window_is_mode_4(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert_right("fia", *qkv((2, 4), (2, 9)), window=(2, 1))
    assert without_mask(asked[0]) == DENSE | {"sparse_mode": 4, "pre_tokens": 2, "next_tokens": 1}


@pytest.mark.parametrize("queries", ["same", "all"])
def test_padding_runs_in_place_by_lengths(monkeypatch: pytest.MonkeyPatch, queries: Any) -> None:
    asked = record(monkeypatch)
    q, k, v = qkv((3, 6))
    k[0, 4:], v[1, 2:], v[2] = (float("nan"),) * 3
    assert_right("fia", q, k, v, structure=pa.KeyPadding.from_lengths([4, 2, 0], 6, queries=queries))
    rows = [4, 2, 0] if queries == "same" else [6, 6, 0]
    assert asked == [DENSE | {"actual_seq_lengths": rows, "actual_seq_lengths_kv": [4, 2, 0]}]


def test_a_mask_of_all_heads_is_whole_and_rows_that_see_nothing_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    keep = torch.tensor([[True, False, True], [False, False, False]])
    out = assert_right("fia", *qkv((2, 5), (2, 3)), structure=pa.Mask.keys(keep))
    assert torch.equal(asked[0]["atten_mask"].cpu(), ~keep[:, None, None].expand(2, 1, 5, 3))
    assert without_mask(asked[0]) == DENSE | {"sparse_mode": 1, "inner_precise": 2}
    assert out[1].eq(0).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_documents_are_packed_under_a_mask_where_cann_takes_them_and_padded_elsewhere(
    monkeypatch: pytest.MonkeyPatch, causal: bool, dtype: torch.dtype
) -> None:
    asked = record(monkeypatch)
    monkeypatch.setattr(cann, "installed", lambda: "8.5.0")
    packed = pa.Packed.from_lengths([2, 3, 4], [3, 1, 5])
    assert_right("fia", *qkv((9,), dtype=dtype), structure=packed, causal=causal)
    (call,) = asked
    if causal and dtype == torch.bfloat16:
        assert (call["input_layout"], call["sparse_mode"]) == ("TND", 3)
        assert (call["actual_seq_lengths"], call["actual_seq_lengths_kv"]) == ([2, 3, 7], [3, 4, 9])
    else:
        rows = [2, 1, 4] if causal else [2, 3, 4]
        assert (call["input_layout"], call["actual_seq_lengths"]) == ("BSND", rows)
        assert call["actual_seq_lengths_kv"] == [3, 1, 5]


@pytest.mark.parametrize("more", [{}, {"causal": True}, {"window": (3, 0)}])
def test_documents_of_very_unequal_lengths_are_not_padded_to_the_longest(monkeypatch, more: dict) -> None:
    monkeypatch.setattr(cann, "installed", lambda: "8.2")
    asked = record(monkeypatch)
    lengths = [64] + [1] * 9
    q, k, v = qkv((sum(lengths),), (sum(lengths),))
    given = {"structure": pa.Packed.from_lengths(lengths), "return_lse": True, **more}
    out, lse = pa.attention(q, k, v, backend="fia", **given)
    want, want_lse = exact(q, k, v, **given)
    assert_near(out, want)
    assert_near(lse, want_lse)
    assert len(asked) == len(lengths), "a call a document"


def test_a_single_document_runs_on_views(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert_right("fia", *qkv((9,)), structure=pa.Packed.real_and_pad(5, 9))
    assert asked == [DENSE]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", ["batched", "padded", "packed"])
def test_pages_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch, layout: str, causal: bool) -> None:
    asked = record(monkeypatch)
    new = {"batched": None, "padded": [3, 2, 0], "packed": [3, 2, 4]}[layout]
    rows = (9,) if layout == "packed" else (3, 4)
    q = drawn(*rows, 4, 64)
    k, v = pools()
    for pool in (k, v):
        pool[7], pool[2, 44:] = float("nan"), float("nan")  # a page of nobody, rows past a length
    assert_right("fia", q, k, v, structure=pa.Paged(TABLE, KV_LENGTHS, new), causal=causal)
    (call,) = asked
    assert call["block_size"] == PAGE
    assert (call["actual_seq_lengths_kv"], call["actual_seq_lengths"]) == (KV_LENGTHS, new or [4, 4, 4])
    assert torch.equal(call["block_table"].cpu(), torch.tensor(TABLE, dtype=torch.int32))
    assert call.get("sparse_mode") == (3 if causal else None)


def test_one_new_token_a_row_is_the_decode_kernel_s(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    assert_right("fia", drawn(3, 1, 4, 64), *pools(), structure=pa.Paged(TABLE, KV_LENGTHS), causal=True)
    assert "atten_mask" not in asked[0]
    assert "inner_precise" not in asked[0]


def test_a_row_without_keys_is_zero() -> None:
    out = assert_right("fia", drawn(3, 4, 4, 64), *pools(), structure=pa.Paged(TABLE, [300, 0, 5]), causal=True)
    assert out[1].eq(0).all()


NO_ROWS = torch.zeros(0, 3, dtype=torch.int32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("rows", "structure"),
    [
        ((0, 4), pa.Paged(NO_ROWS, [])),
        ((0, 4), pa.Paged(NO_ROWS, [], [])),
        ((0,), pa.Paged(NO_ROWS, [], [])),
        ((0, 4), pa.Paged(NO_ROWS, [], None, [])),
        ((3, 0), pa.Paged(TABLE, KV_LENGTHS)),
        ((0,), pa.Paged(TABLE, KV_LENGTHS, [0, 0, 0])),
    ],
    ids=["no row", "no row, padded", "no row, packed", "no row, spans", "no query", "no query, packed"],
)
def test_pages_of_no_row_or_for_no_query_need_no_op(
    monkeypatch, rows: tuple[int, ...], structure, causal: bool
) -> None:
    asked = record(monkeypatch)
    out = assert_right("fia", drawn(*rows, 4, 64), *pools(), structure=structure, causal=causal)
    assert out.shape == (*rows, 4, 64)
    assert asked == []


def test_rows_that_share_pages_run_apart_where_the_pool_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record(monkeypatch)
    k, v = (pool[:3].contiguous() for pool in pools())
    table = [[0, 1], [0, 2]]
    assert_right("fia", drawn(2, 4, 4, 64), k, v, structure=pa.Paged(table, [200, 150]), causal=True)
    assert [call["actual_seq_lengths_kv"] for call in asked] == [[200], [150]]


@pytest.mark.parametrize("layout", ["batched", "packed"])
def test_spans_over_pages_read_what_was_written_once(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    asked = record(monkeypatch)
    cache = pa.PagedKVCache(8, PAGE, 2, 64, torch.float16, DEVICE)
    for row, length in zip(TABLE, KV_LENGTHS, strict=True):
        slots = torch.tensor([row[i // PAGE] * PAGE + i % PAGE for i in range(length)]).to(DEVICE)
        cache.write(drawn(length, 2, 64, seed=3), drawn(length, 2, 64, seed=4), slots)
    k, v = cache.k.clone(), cache.v.clone()
    q = drawn(12, 4, 64) if layout == "packed" else drawn(3, 4, 4, 64)
    spans = [[(10, 20), (297, 299)], [], [(0, 5)]]
    paged = pa.Paged(TABLE, KV_LENGTHS, [4, 4, 4] if layout == "packed" else None, spans)
    assert_right("fia", q, cache.k, cache.v, structure=paged)
    assert [call["actual_seq_lengths_kv"] for call in asked] == [[297], [299], [300], [130], [5]]
    assert [call.get("sparse_mode", 0) for call in asked] == [0, 0, 0, 3, 0]
    assert torch.equal(cache.k, k)
    assert torch.equal(cache.v, v)


def test_a_buffer_is_written_and_returned() -> None:
    q, k, v = qkv((2, 5), (2, 7))
    buffer = torch.full((2, 5, 4, 64), float("nan"), dtype=q.dtype, device=DEVICE)
    assert pa.attention(q, k, v, backend="fia", out=buffer) is buffer
    assert_near(buffer, exact(q, k, v))


def test_what_the_op_lacks_is_refused_by_name() -> None:
    q, k, v = qkv((2, 5))
    assert "softcap" in refused("fia", q, k, v, softcap=1.5)
    assert "dtype float32" in refused("fia", q.float(), k.float(), v.float())
    assert "backward" in refused("fia", q.clone().requires_grad_(), k, v)
    assert "head_dim 40" in refused("fia", *qkv((2, 5), dim=40))
    assert "bias" in refused("fia", q, k, v, structure=pa.Mask(torch.zeros(1, 1, 5, 5)))
    assert "4 heads" in refused("fia", q, k, v, structure=pa.Mask(torch.ones(1, 4, 5, 5).tril().bool()))
    one = qkv((2, 1), (2, 600))
    assert "512" in refused("fia", *one, structure=pa.Mask(torch.ones(2, 600).tril().bool()))
    holes = pa.KeyPadding.from_mask([[True, False, True, True, True]] * 2)
    assert "holes" in refused("fia", q, k, v, structure=holes)
    assert "128 query heads on 1" in refused("fia", *qkv((1, 2), heads=128, kv_heads=1))


def test_what_only_the_device_knows_is_refused_with_the_way_out() -> None:
    q, (k, v) = drawn(3, 4, 4, 64), pools()
    table = torch.tensor(TABLE, dtype=torch.int32).to(DEVICE)
    assert "check=True" in refused("fia", q, k, v, structure=pa.Paged(table, KV_LENGTHS))
    lengths = torch.tensor(KV_LENGTHS, dtype=torch.int32).to(DEVICE)
    assert "check=True" in refused("fia", q, k, v, structure=pa.Paged(TABLE, lengths))
    boundaries = torch.tensor([0, 2, 5], dtype=torch.int32).to(DEVICE)
    assert "check=True" in refused("fia", *qkv((5,)), structure=pa.Packed.from_cu_seqlens(boundaries, max_q=3))


def test_pools_that_would_be_copied_and_other_pages_are_refused() -> None:
    q, (k, v) = drawn(3, 4, 4, 64), pools()
    both = torch.stack([k, v], dim=1)
    paged = pa.Paged(TABLE, KV_LENGTHS)
    assert "contiguous pool" in refused("fia", q, both[:, 0], both[:, 1], structure=paged)
    small = (k.reshape(64, 16, 2, 64), v.reshape(64, 16, 2, 64))
    assert "page_size 16" in refused("fia", q[:1], *small, structure=pa.Paged([[0]], [5]))
    assert "window" in refused("fia", q, k, v, structure=paged, window=(2, 0))
