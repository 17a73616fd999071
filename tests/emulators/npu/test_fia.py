"""npu_fused_infer_attention_score's stand-in: numbers, pages, LSE, refusals and the publicly known failures."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from tests.emulators.npu.fia import npu_fused_infer_attention_score as fia
from tests.emulators.npu.stack import LintError, using

pytestmark = pytest.mark.emulated

CAUSAL = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
BF16 = torch.bfloat16


def drawn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=1e-2, rtol=1e-2)


def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **asked):
    known = {"num_heads": 4, "num_key_value_heads": 2, "scale": 0.1, "input_layout": "BSND", "softmax_lse_flag": True}
    return fia(q, k, v, **(known | asked))


Q, K, V = drawn(2, 3, 4, 64), drawn(2, 5, 2, 64), drawn(2, 5, 2, 64)
T, TK = drawn(5, 4, 64), drawn(7, 2, 64)
TND = {"input_layout": "TND", "actual_seq_lengths": [2, 5], "actual_seq_lengths_kv": [3, 7]}


@pytest.mark.parametrize(("causal", "asked"), [(False, {}), (True, {"atten_mask": CAUSAL, "sparse_mode": 3})])
def test_dense_and_packed_with_their_lse(causal: bool, asked: dict) -> None:
    out, lse = call(Q, K, V, **asked)
    want, want_lse = pa.reference_attention(Q, K, V, causal=causal, scale=0.1, return_lse=True)
    close(out, want)
    close(lse[..., 0], want_lse)
    out, lse = call(T, TK, TK, **TND, **asked)
    packed = pa.Packed.from_lengths([2, 3], [3, 4])
    want, want_lse = pa.reference_attention(T, TK, TK, structure=packed, causal=causal, scale=0.1, return_lse=True)
    close(out, want)
    close(lse[..., 0], want_lse.T)


def test_lengths_hide_keys_and_leave_query_rows_unwritten() -> None:
    out, _ = call(Q, K, V, actual_seq_lengths=[3, 1], actual_seq_lengths_kv=[5, 2])
    want = pa.reference_attention(Q, K, V, structure=pa.KeyPadding.from_lengths([5, 2], 5, queries="all"), scale=0.1)
    close(out[0], want[0])
    close(out[1, :1], want[1, :1])
    assert out[1, 1:].isnan().all()


@pytest.mark.parametrize("packed", [False, True])
def test_pages(packed: bool) -> None:
    pool, table = drawn(4, 128, 2, 64), torch.tensor([[3, 1], [0, -7]], dtype=torch.int32)
    lengths = [140, 5]
    want = pa.reference_attention(Q, pool, pool, structure=pa.Paged(table.clamp(min=0), lengths), scale=0.1)
    asked = {"block_table": table, "block_size": 128, "actual_seq_lengths_kv": lengths}
    if packed:
        headed = pool.transpose(1, 2).contiguous()
        tnd = TND | asked | {"actual_seq_lengths": [3, 6]}
        close(call(Q.flatten(0, 1), headed, headed, **tnd)[0].unflatten(0, (2, 3)), want)
    else:
        close(call(Q, pool.flatten(2), pool.flatten(2), **asked)[0], want)


REFUSED = [
    ("input_layout", (Q, K, V), {"input_layout": "SBH"}),
    ("float16 or bfloat16", (Q.float(), K.float(), V.float()), {}),
    ("not contiguous", (Q.transpose(1, 2), K, V), {"input_layout": "BNSD"}),
    ("3 key heads", (Q, K, V), {"num_key_value_heads": 3}),
    ("multiple of 16", (Q[..., :8].contiguous(), K, V), {}),
    ("takes a mask", (Q, K, V), {"sparse_mode": 3}),
    ("sparse_mode 5", (Q, K, V), {"sparse_mode": 5}),
    ("2048x2048", (Q, K, V), {"sparse_mode": 3, "atten_mask": torch.zeros(3, 5, dtype=torch.bool)}),
    ("not bool", (Q, K, V), {"atten_mask": torch.zeros(3, 5)}),
    ("561002", (Q, K, V), {"atten_mask": torch.zeros(1, 5, dtype=torch.bool)}),
    ("inner_precise", (Q, K, V), {"inner_precise": 4}),
    ("pse_shift", (Q, K, V), {"pse_shift": drawn(1, 1, 1, 5)}),
    ("lengths \\[6, 6\\]", (Q, K, V), {"actual_seq_lengths_kv": [6]}),
    ("not T 5", (T, TK, TK), TND | {"actual_seq_lengths": [2, 4]}),
    ("falls", (T, TK, TK), TND | {"actual_seq_lengths": [6, 5]}),
    ("both lists", (T, TK, TK), TND | {"actual_seq_lengths": None}),
    ("takes no mask", (T, TK, TK), TND | {"atten_mask": CAUSAL}),
    ("more queries", (T, TK, TK), TND | {"actual_seq_lengths": [4, 5], "sparse_mode": 3, "atten_mask": CAUSAL}),
    ("queryD 32", (T[..., :32].contiguous(), TK[..., :32].contiguous(), TK[..., :32].contiguous()), TND),
    ("bfloat16 only", (T.half(), TK.half(), TK.half()), TND),
]


WIDE = drawn(1, 1, 256, 256)
ONE = drawn(2, 1, 4, 64)
SINK = drawn(4)
CODES = {"float16 or bfloat16": (Q.to(torch.float8_e4m3fn),) * 3}
REFUSED += [
    ("num_heads must be greater", (Q, K, V), {"num_heads": 0}),
    ("query of 4 axes", (Q, K, V), {"input_layout": "BSH"}),
    ("num_heads 2 and a query of 4", (Q, K, V), {"num_heads": 2}),
    ("do not fit the query", (Q, K, V[:, :4].contiguous()), {}),
    ("65536 > 65535", (WIDE,) * 3, {"num_heads": 256, "num_key_value_heads": 256}),
    ("head dim 528", (drawn(1, 1, 1, 528),) * 3, {"num_heads": 1, "num_key_value_heads": 1}),
    ("65 query heads and 1", (drawn(1, 2, 65, 64), K[:1, :, :1].contiguous(), K[:1, :, :1].contiguous()),
     {"num_heads": 65, "num_key_value_heads": 1}),
    ("float16 or bfloat16", CODES["float16 or bfloat16"], {}),
    ("sparse_mode 6", (Q, K, V), {"sparse_mode": 6}),
    ("both negative", (Q, K, V), {"sparse_mode": 4, "atten_mask": CAUSAL, "pre_tokens": -1, "next_tokens": -1}),
    ("nothing is between", (Q, K, V), {"sparse_mode": 4, "atten_mask": CAUSAL, "pre_tokens": 1, "next_tokens": -2}),
    ("leave nothing", (Q, K, V), {"sparse_mode": 4, "atten_mask": CAUSAL, "next_tokens": -3}),
    ("learnable_sink is for TND", (Q, K, V), {"learnable_sink": SINK}),
    ("learnable_sink must be", (T, TK, TK), TND | {"learnable_sink": SINK.float()}),
    ("inner_precise 2", (T, TK, TK), TND | {"inner_precise": 2}),
    ("sparse_mode 2", (T, TK, TK), TND | {"sparse_mode": 2, "atten_mask": CAUSAL}),
    ("takes no pse_shift", (T, TK, TK), TND | {"pse_shift": drawn(1, 4, 5, 7)}),
    ("heads with value head dim 192", (drawn(5, 4, 192), drawn(7, 2, 192), drawn(7, 2, 192)), TND),
    ("2 and 1 lengths", (T, TK, TK), TND | {"actual_seq_lengths_kv": [7]}),
    ("inner_precise 2", (ONE, K, V), {"inner_precise": 2}),
    ("rows of one query", (ONE, K, V), {"atten_mask": torch.zeros(1, 1, 1, 5, dtype=torch.bool)}),
    ("rows of one query", (ONE, K, V), {"atten_mask": CAUSAL, "sparse_mode": 3}),
    (r"lengths \[4, 1\], S 3", (Q, K, V), {"actual_seq_lengths": [4, 1]}),
]  # fmt: skip


@pytest.mark.parametrize(("words", "tensors", "asked"), REFUSED)
def test_refuses(words: str, tensors: tuple[torch.Tensor, ...], asked: dict) -> None:
    with pytest.raises(RuntimeError, match=words):
        call(*tensors, **asked)


@pytest.mark.parametrize(
    ("words", "change"),
    [
        ("block_size 64", {"block_size": 64}),
        ("not in the cache", {"block_table": torch.tensor([[4, 0], [0, 0]], dtype=torch.int32)}),
        (
            "a cache of 4 pages",
            {"actual_seq_lengths_kv": [384, 256], "block_table": torch.zeros(2, 3, dtype=torch.int32)},
        ),
        ("int32", {"block_table": torch.zeros(2, 2, dtype=torch.int64)}),
        ("pages", {"actual_seq_lengths_kv": [300, 1]}),
        ("0 key lengths", {"actual_seq_lengths_kv": None}),
    ],
)
def test_refuses_pages(words: str, change: dict) -> None:
    pool, table = drawn(4, 128, 128), torch.zeros(2, 2, dtype=torch.int32)
    asked = {"block_table": table, "block_size": 128, "actual_seq_lengths_kv": [140, 5]}
    with pytest.raises(RuntimeError, match=words):
        call(Q, pool, pool, **(asked | change))


def test_a_mask_of_one_row_is_not_read_past_key_512() -> None:
    k = drawn(1, 520, 2, 64)
    mask = torch.zeros(1, 1, 1, 520, dtype=torch.bool)
    mask[..., 500:] = True
    see = torch.cat([~mask[0, 0, 0, :512], torch.ones(8, dtype=torch.bool)])
    close(call(Q[:1], k, k, atten_mask=mask)[0], pa.reference_attention(Q[:1], k, k, structure=pa.Mask(see), scale=0.1))
    with using(lint=True), pytest.raises(LintError, match="512"):
        call(Q[:1], k, k, atten_mask=mask)


def test_old_and_broken_stacks() -> None:
    with using(cann="8.2"), pytest.raises(RuntimeError, match="queryD 64"):
        call(T, TK, TK, **TND)
    with using(cann="broken"):
        mean = TK[:3].float().mean(0).repeat_interleave(2, 0)
        close(call(T, TK, TK, **TND)[0][0], mean)
    with using(cann="8.5-fp16"):
        assert call(T.half(), TK.half(), TK.half(), **TND)[0].isfinite().all()


def test_one_query_a_row_takes_smaller_pages_a_mask_of_its_own_and_ignores_the_sparse_mode() -> None:
    mask = torch.zeros(2, 1, 1, 5, dtype=torch.bool)
    mask[1, ..., 3:] = True
    want = pa.reference_attention(ONE, K, V, structure=pa.Mask(~mask[:, 0, 0]), scale=0.1)
    for mode in (0, 1, 3):
        close(call(ONE, K, V, atten_mask=mask, sparse_mode=mode)[0], want)
    pool, table = drawn(4, 16, 128), torch.tensor([[3], [1]], dtype=torch.int32)
    pages = {"block_table": table, "block_size": 16, "actual_seq_lengths_kv": [16, 3]}
    want = pa.reference_attention(
        ONE, *(pool.unflatten(2, (2, 64)),) * 2, structure=pa.Paged(table, [16, 3]), scale=0.1
    )
    close(call(ONE, pool, pool, **pages)[0], want)
    with pytest.raises(RuntimeError, match="block_size 16"):
        call(Q, pool, pool, **pages)
    wide = pages | {"block_table": torch.zeros(2, 2, dtype=torch.int32)}
    with pytest.raises(RuntimeError, match="shorter than the table"):
        call(ONE, pool, pool, atten_mask=torch.zeros(2, 1, 1, 16, dtype=torch.bool), **wide)


def test_layouts_that_differ_between_inputs_and_output() -> None:
    want = call(Q, K, V)[0]
    turned = [t.transpose(1, 2).contiguous() for t in (Q, K, V)]
    assert torch.equal(call(*turned, input_layout="BNSD_BSND")[0], want)
    assert torch.equal(call(Q, K, V, input_layout="BSND_BNSD")[0].transpose(1, 2), want)
    assert torch.equal(call(*(t.flatten(2) for t in (Q, K, V)), input_layout="BSH_BNSD")[0].transpose(1, 2), want)
    heads_first = [t.transpose(0, 1).contiguous() for t in (T, TK, TK)]
    assert torch.equal(call(*heads_first, **(TND | {"input_layout": "NTD_TND"}))[0], call(T, TK, TK, **TND)[0])


def test_a_sink_of_packed_rows_takes_weight_and_gives_no_value() -> None:
    plain, lse = call(T, TK, TK, **TND)
    got = call(T, TK, TK, **TND, learnable_sink=SINK)[0]
    close(got, plain.double() * torch.sigmoid(lse.double() - SINK.double()[None, :, None]))


def test_without_keys_the_answer_is_zero() -> None:
    assert call(Q, K[:, :0].contiguous(), V[:, :0].contiguous())[0].eq(0).all()
    assert call(Q[:, :0].contiguous(), K, V)[0].shape == (2, 0, 4, 64)
