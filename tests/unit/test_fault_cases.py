"""Public fault reports of wrong values, as small inputs with the right outcome, on every way to compute here.

The numbers are rows of knowledge/fault_cases.md. Those about choosing a backend are in test_fault_cases_of_routing.py.
"""

import math
from functools import partial

import pytest
import torch

import polyattn as pa
from tests.unit.fault_values import assert_rows, batch, values

NAN, INF = float("nan"), float("inf")
T, F = True, False

#: Every way to compute on this machine: automatic choice, each built-in backend by name, and the oracle.
WAYS = {"auto": pa.attention, "reference": pa.reference_attention} | {
    backend.name: partial(pa.attention, backend=backend.name) for backend in pa.current_platform.backends
}
every_way = pytest.mark.parametrize("attend", WAYS.values(), ids=WAYS)


# 1: documents attend to themselves alone


@every_way
def test_1_packed_documents_stay_apart(attend):
    v = values(1, 3, 5, 7, 8, 9)
    for structure in (pa.Packed.from_cu_seqlens([0, 2, 3, 6], max_q=3), pa.Packed.from_lengths([2, 1, 3])):
        assert_rows(attend(torch.zeros_like(v), v, v, structure=structure), [2, 2, 5, 8, 8, 8])


@every_way
def test_1_packed_documents_equal_a_loop_over_them(attend):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 6, 2, 64).unbind()
    cuts = ((0, 2), (2, 3), (3, 6))
    loop = torch.cat([pa.reference_attention(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in cuts])
    out = attend(q, k, v, structure=pa.Packed.from_lengths([2, 1, 3]))
    torch.testing.assert_close(out.double(), loop, atol=1e-5, rtol=0)


# 4: a key mask says nothing about queries


@every_way
def test_4_a_key_mask_is_not_applied_to_the_query(attend):
    v = batch((1, 3, 9), (5, 7, 9))
    keep = pa.KeyPadding.from_mask([[T, T, F], [T, F, F]], queries="all")
    for queries in (4, 3):
        out = attend(torch.zeros(2, queries, 2, 64), v, v, structure=keep)
        assert_rows(out, [[2.0] * queries, [5.0] * queries])


@pytest.mark.parametrize("queries", [4, 3])
def test_4_a_cross_layer_keeps_every_query_row(queries):
    v = batch((1, 3, 9), (5, 7, 9))
    layer = pa.Attention(2, 64, role="cross")
    out = layer(torch.zeros(2, queries, 2, 64), v, v, pa.KeyPadding.from_mask([[T, T, F], [T, F, F]]))
    assert_rows(out, [[2.0] * queries, [5.0] * queries])


# 5: boundaries of 64 bits, and boundaries that cannot be


@every_way
def test_5_int64_boundaries_give_the_bits_of_int32(attend):
    v = values(1, 2, 3, 10, 20, 30)
    wide, narrow = (
        attend(torch.zeros_like(v), v, v, structure=pa.Packed.from_cu_seqlens(torch.tensor([0, 3, 6], dtype=dtype)))
        for dtype in (torch.int64, torch.int32)
    )
    assert_rows(wide, [2, 2, 2, 20, 20, 20])
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize(("boundaries", "rows", "error", "words"), [
    (torch.tensor([0, 3, 2**31 + 5]), 6, ValueError, ("int32", "2147483653")),
    (torch.tensor([0, 4, 8, 12]), 4, ValueError, ("12", "4")),
    (torch.tensor([0, 4, 3, 6]), 6, ValueError, ("non-decreasing", "4 then 3")),
    (torch.tensor([0.0, 3.0, 6.0]), 6, TypeError, ("float32",)),
])  # fmt: skip
def test_5_boundaries_that_cannot_be_are_refused_by_name(boundaries, rows, error, words):
    v = values(*range(rows))
    with pytest.raises(error) as refusal:
        pa.attention(v, v, v, structure=pa.Packed.from_cu_seqlens(boundaries))
    assert all(word in str(refusal.value) for word in ("cu_seqlens", *words))


# 7: rows that see nothing

LOWEST = torch.finfo(torch.float16).min
MASKS = {
    "A bool": torch.tensor([[T, T, F], [F, F, F]]),
    "B additive": torch.tensor([[0, 0, -INF], [-INF, -INF, -INF]]),
    "C two planes of the minimum": torch.tensor([[0, 0, LOWEST], [LOWEST] * 3], dtype=torch.float16) * 2,
    "D one plane of the minimum": torch.tensor([[0, 0, LOWEST], [LOWEST] * 3], dtype=torch.float16),
}


@every_way
@pytest.mark.parametrize("plane", MASKS.values(), ids=MASKS)
def test_7_a_row_that_sees_nothing_is_zero_without_nan(attend, plane):
    dtype = torch.float32 if attend is pa.reference_attention or plane.dtype != torch.float16 else torch.float16
    v = batch((2, 4, 8), dtype=dtype).requires_grad_()
    q, k = torch.zeros(1, 2, 2, 64, dtype=dtype, requires_grad=True), torch.zeros_like(v).requires_grad_()
    out, lse = attend(q, k, v, structure=pa.Mask.pairs(plane), return_lse=True)
    assert_rows(out, [[3.0, 0.0]], 2e-2 if dtype == torch.float16 else 1e-6)
    assert lse[0, :, 0].tolist() == pytest.approx([math.log(2)] * 2, rel=1e-3)
    assert lse[0, :, 1].tolist() == [-INF] * 2
    out.sum().backward()
    assert all(tensor.grad.isfinite().all() for tensor in (q, k, v))
    assert v.grad[0, :, 0, 0].tolist() == pytest.approx([0.5, 0.5, 0.0])


@every_way
def test_7_a_whole_sample_may_be_hidden(attend):
    v = batch((2, 4, 8), (2, 4, 8))
    for hidden in (pa.Mask([[T, T, T], [F, F, F]]), pa.KeyPadding.from_lengths([3, 0], 3)):
        out = attend(torch.zeros_like(v), v, v, structure=hidden)
        assert_rows(out, [[14 / 3] * 3, [0.0] * 3])


# 10: causal is bottom-right


@every_way
def test_10_causal_ends_on_the_last_key(attend):
    for queries, keys, expected in ((2, (1, 2, 3, 4, 5), [2.5, 3.0]), (5, (4, 8), [0, 0, 0, 4, 6])):
        v = batch(keys)
        assert_rows(attend(torch.zeros(1, queries, 2, 64), v, v, causal=True), [expected])
    v = values(1, 2, 3, 4, 5, 4, 8)
    documents = pa.Packed.from_cu_seqlens([0, 2, 4], [0, 5, 7])
    assert_rows(attend(torch.zeros(4, 2, 64), v, v, structure=documents, causal=True), [2.5, 3, 4, 6])


# 12: any strides


def strided_values():
    s, h, d = torch.meshgrid(torch.arange(6.0), torch.arange(2.0), torch.arange(4.0), indexing="ij")
    v = (100 * h + 10 * s + d)[None]
    qkv, wide = torch.zeros(1, 6, 3, 2, 4), torch.zeros(1, 6, 2, 8)
    qkv[:, :, 2], wide[..., ::2] = v, v
    return v, {
        "transposed": v.transpose(1, 2).contiguous().transpose(1, 2),
        "packed": qkv[:, :, 2],
        "step": wide[..., ::2],
    }


@every_way
@pytest.mark.parametrize("layout", ["transposed", "packed", "step"])
def test_12_a_strided_v_gives_the_contiguous_bits(attend, layout):
    contiguous, layouts = strided_values()
    v, q = layouts[layout], torch.zeros(1, 6, 2, 4)
    assert v.stride() != contiguous.stride()
    out = attend(q, q, v)
    torch.testing.assert_close(out[0, 0].double(), torch.tensor([[25.0, 26, 27, 28], [125, 126, 127, 128]]).double())
    assert torch.equal(out, attend(q, q, contiguous))
    assert torch.equal(v, contiguous)


@every_way
def test_12_expanded_keys_and_values(attend):
    torch.manual_seed(0)
    q = torch.randn(1, 5, 4, 64, dtype=torch.bfloat16)
    k, v = (torch.randn(1, 33, 1, 64, dtype=torch.bfloat16).expand(1, 33, 4, 64) for _ in "kv")
    exact = pa.reference_attention(q, k.contiguous(), v.contiguous())
    torch.testing.assert_close(attend(q, k, v).double(), exact, atol=2e-2, rtol=0)


# 16: nothing to attend from, or to

EMPTY = {
    "no batch": ((0, 4, 2, 16), (0, 4, 2, 16), None),
    "no queries": ((2, 0, 2, 16), (2, 3, 2, 16), None),
    "no keys": ((1, 3, 2, 16), (1, 0, 2, 16), None),
    "no documents": ((0, 2, 16), (0, 2, 16), lambda: pa.Packed.from_cu_seqlens([0])),
    "an empty document": ((0, 2, 16), (0, 2, 16), lambda: pa.Packed.from_cu_seqlens([0, 0])),
    "no rows kept": ((0, 4, 2, 16), (0, 4, 2, 16), lambda: pa.KeyPadding.from_lengths([], 4)),
    "no samples": ((0, 4, 2, 16), (0, 4, 2, 16), lambda: pa.Spans([])),
    "an empty mask": ((1, 3, 2, 16), (1, 0, 2, 16), lambda: pa.Mask(torch.ones(1, 3, 0))),
    "no table": ((0, 1, 2, 16), (3, 2, 2, 16), lambda: pa.Paged([], [])),
}


@every_way
@pytest.mark.parametrize("case", EMPTY)
def test_16_empty_calls_answer_with_zeros_of_the_right_shape(attend, case):
    q_shape, k_shape, structure = EMPTY[case]
    q = torch.ones(q_shape, dtype=torch.float64)
    k = torch.ones(k_shape, dtype=torch.float64)
    out, lse = attend(q, k, k, structure=structure and structure(), return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert (out.dtype, out.device) == (q.dtype, q.device)
    assert torch.equal(lse, torch.full((*q_shape[:-3], 2, q_shape[-3]), -INF, dtype=lse.dtype))


@pytest.mark.parametrize("case", ["no batch", "no queries", "no keys", "an empty document"])
def test_16_compiled_calls_answer_like_eager_ones(case):
    q_shape, k_shape, structure = EMPTY[case]
    given = structure and structure()
    compiled = torch.compile(lambda q, k: pa.attention(q, k, k, structure=given), backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(q_shape), torch.ones(k_shape)), torch.zeros(q_shape))


@every_way
def test_16_empty_documents_among_others(attend):
    v = values(1, 3, 5)
    documents = pa.Packed.from_lengths([0, 2, 1, 0], [2, 1, 0, 0])
    assert_rows(attend(torch.zeros(3, 2, 64), v, v, structure=documents), [5, 5, 0])


# 36: pages


def pool():
    """4 pages of 2 rows: page p holds 10p+5 and 10p+6; the second row of page 0, and page 3, hold NaN."""
    rows = torch.tensor([[5.0, NAN], [15, 16], [25, 26], [NAN, NAN]])
    return rows[..., None, None].expand(4, 2, 2, 64).contiguous()


@every_way
@pytest.mark.parametrize("table", [
    [[2, 0, -1]], [[2, 0, 3]], [[2, 0, 99]], torch.tensor([[2, 0, -1]]), torch.tensor([[2, 0, -1]], dtype=torch.int32),
], ids=["missing", "nan page", "past the pool", "int64", "int32"])  # fmt: skip
def test_36_only_the_rows_within_the_length_are_read(attend, table):
    v = pool()
    assert_rows(attend(torch.zeros(1, 1, 2, 64), v, v, structure=pa.Paged(table, [3])), [[56 / 3]])


@every_way
def test_36_a_row_of_length_0_is_zero(attend):
    v = pool()
    out = attend(torch.zeros(2, 1, 2, 64), v, v, structure=pa.Paged([[3, 0], [2, 0]], [0, 3]))
    assert_rows(out, [[0.0], [56 / 3]])


@pytest.mark.parametrize(("table", "error", "words"), [
    ([[2, 7, -1]], ValueError, ("7", "4")),
    ([[2, -1, -1]], ValueError, ("row 0", "slot 1")),
    (torch.tensor([[2.0, 0.0]]), TypeError, ("float32",)),
    (torch.tensor([2, 0]), ValueError, ("[batch, max_pages]", "[2]")),
])  # fmt: skip
def test_36_tables_that_cannot_be_are_refused_by_name(table, error, words):
    v = pool()
    with pytest.raises(error) as refusal:
        pa.attention(torch.zeros(1, 1, 2, 64), v, v, structure=pa.Paged(table, [3]))
    assert all(word in str(refusal.value) for word in ("block_table", *words))


# 38: the number of tiles kept comes from the number of tiles, and is clamped to it


@pytest.mark.parametrize(("by", "kept"), [
    ({"sparsity": 0}, 8), ({"sparsity": 0.5}, 4), ({"sparsity": 0.9}, 1), ({"sparsity": 1.0}, 1), ({"topk": 8}, 8),
    ({"topk": 64}, 8),
])  # fmt: skip
def test_38_tiles_are_counted_with_the_partial_ones(by, kept):
    assert pa.VideoTiles(pa.VideoLayout((5, 5, 5)), (4, 4, 4), **by).kept == kept


@every_way
@pytest.mark.parametrize("keep_sparse_numerics", [False, True])
@pytest.mark.parametrize("topk", [8, 64])
def test_38_all_tiles_kept_are_dense_attention(attend, topk, keep_sparse_numerics):
    v = batch(range(125))
    whole = pa.VideoTiles(pa.VideoLayout((5, 5, 5)), (4, 4, 4), topk=topk, keep_sparse_numerics=keep_sparse_numerics)
    assert_rows(attend(torch.zeros_like(v), v, v, structure=whole), [[62.0] * 125], tolerance=1e-5)


@pytest.mark.parametrize("topk", [0, -1])
def test_38_no_tile_kept_is_refused(topk):
    with pytest.raises(ValueError, match=f"topk.*{topk}"):
        pa.VideoTiles(pa.VideoLayout((5, 5, 5)), (4, 4, 4), topk=topk)


@every_way
def test_38_another_length_is_refused_with_both(attend):
    v = batch(range(124))
    with pytest.raises(ValueError, match="125.*124"):
        attend(v, v, v, structure=pa.VideoTiles(pa.VideoLayout((5, 5, 5)), (4, 4, 4), topk=1))
