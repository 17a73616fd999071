"""Public fault reports of wrong values, on the device, through every backend; the inputs are the unit tests' own."""

from __future__ import annotations

import math

import pytest
import torch

import polyattn as pa
from platforms.cuda.tests.on_device.here import DEVICE, Name, assert_near, attend, drawn, dtype_of, every_backend, exact
from tests.unit.fault_values import batch, values
from tests.unit.test_fault_cases import EMPTY, MASKS, pool, strided_values

pytestmark = pytest.mark.cuda

INF = float("inf")
T, F = True, False


def here(tensor: torch.Tensor, backend: Name) -> torch.Tensor:
    return tensor.to(DEVICE, dtype_of(backend))


def assert_rows(out: torch.Tensor, expected: list[float] | list[list[float]]) -> None:
    """Every head and channel of row s holds expected[s]; an exact 0 where that is expected."""
    want = torch.tensor(expected, dtype=torch.float64)[..., None, None].expand(out.shape)
    got = out.detach().cpu().double()
    torch.testing.assert_close(got, want, atol=1e-6, rtol=2e-2)
    assert (got[want == 0] == 0).all()


@every_backend
def test_1_packed_documents_stay_apart(backend: Name) -> None:
    v = here(values(1, 3, 5, 7, 8, 9), backend)
    for structure in (pa.Packed.from_cu_seqlens([0, 2, 3, 6], max_q=3), pa.Packed.from_lengths([2, 1, 3])):
        assert_rows(attend(backend, torch.zeros_like(v), v, v, structure=structure), [2, 2, 5, 8, 8, 8])


@every_backend
def test_1_packed_documents_whose_boundaries_only_the_device_knows_stay_apart(backend: Name) -> None:
    v = here(values(1, 3, 5, 7, 8, 9), backend)
    structure = pa.Packed.from_cu_seqlens(torch.tensor([0, 2, 3, 6], device=DEVICE), max_q=3)
    assert_rows(attend(backend, torch.zeros_like(v), v, v, structure=structure), [2, 2, 5, 8, 8, 8])


@every_backend
def test_1_packed_documents_equal_a_loop_over_them(backend: Name) -> None:
    q, k, v = (drawn(6, 2, 64, dtype=dtype_of(backend), seed=seed) for seed in range(3))
    loop = torch.cat([exact(q[None, a:b], k[None, a:b], v[None, a:b])[0] for a, b in ((0, 2), (2, 3), (3, 6))])
    assert_near(attend(backend, q, k, v, structure=pa.Packed.from_lengths([2, 1, 3])), loop)


@every_backend
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_4_a_key_mask_is_not_applied_to_the_query(backend: Name, on_device: bool) -> None:
    v = here(batch((1, 3, 9), (5, 7, 9)), backend)
    kept = torch.tensor([[T, T, F], [T, F, F]], device=DEVICE if on_device else "cpu")
    keep = pa.KeyPadding.from_mask(kept, queries="all")
    for queries in (4, 3):
        q = here(torch.zeros(2, queries, 2, 64), backend)
        assert_rows(attend(backend, q, v, v, structure=keep), [[2.0] * queries, [5.0] * queries])


@pytest.mark.parametrize("queries", [4, 3])
def test_4_a_cross_layer_keeps_every_query_row(queries: int) -> None:
    v = here(batch((1, 3, 9), (5, 7, 9)), None)
    layer = pa.Attention(2, 64, role="cross")
    q = here(torch.zeros(2, queries, 2, 64), None)
    out = layer(q, v, v, pa.KeyPadding.from_mask([[T, T, F], [T, F, F]]))
    assert_rows(out, [[2.0] * queries, [5.0] * queries])


@every_backend
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_5_int64_boundaries_give_the_bits_of_int32(backend: Name, device: str) -> None:
    v = here(values(1, 2, 3, 10, 20, 30), backend)
    where = DEVICE if device == "cuda" else device
    wide, narrow = (
        attend(
            backend, torch.zeros_like(v), v, v,
            structure=pa.Packed.from_cu_seqlens(torch.tensor([0, 3, 6], dtype=dtype, device=where), max_q=3),
        )
        for dtype in (torch.int64, torch.int32)
    )  # fmt: skip
    assert_rows(wide, [2, 2, 2, 20, 20, 20])
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize(("boundaries", "rows", "error", "words"), [
    (torch.tensor([0, 3, 2**31 + 5]), 6, ValueError, ("int32", "2147483653")),
    (torch.tensor([0, 4, 8, 12]), 4, ValueError, ("12", "4")),
    (torch.tensor([0, 4, 3, 6]), 6, ValueError, ("non-decreasing", "4 then 3")),
    (torch.tensor([0.0, 3.0, 6.0]), 6, TypeError, ("float32",)),
])  # fmt: skip
def test_5_boundaries_that_cannot_be_are_refused_by_name(boundaries, rows, error, words) -> None:
    v = here(values(*range(rows)), None)
    for given in (boundaries, boundaries.to(DEVICE)):
        with pytest.raises(error) as refusal:
            pa.attention(v, v, v, structure=pa.Packed.from_cu_seqlens(given, check=True))
        assert all(word in str(refusal.value) for word in ("cu_seqlens", *words))


@every_backend
@pytest.mark.parametrize("grad", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("plane", MASKS.values(), ids=MASKS)
def test_7_a_row_that_sees_nothing_is_zero_without_nan(backend: Name, plane: torch.Tensor, grad: bool) -> None:
    v = here(batch((2, 4, 8)), backend).requires_grad_(grad)
    q = here(torch.zeros(1, 2, 2, 64), backend).requires_grad_(grad)
    k = torch.zeros_like(v).requires_grad_(grad)
    given = {"structure": pa.Mask.pairs(plane.to(DEVICE)), "return_lse": True}
    out, lse = attend(backend, q, k, v, **given)
    assert_rows(out, [[3.0, 0.0]])
    assert lse[0, :, 0].tolist() == pytest.approx([math.log(2)] * 2, rel=1e-3)
    assert lse[0, :, 1].tolist() == [-INF] * 2
    if grad:
        out.sum().backward()
        assert all(tensor.grad is not None and tensor.grad.isfinite().all() for tensor in (q, k, v))


@every_backend
def test_7_a_whole_sample_may_be_hidden(backend: Name) -> None:
    v = here(batch((2, 4, 8), (2, 4, 8)), backend)
    for hidden in (pa.KeyPadding.from_lengths([3, 0], 3), pa.Mask([[T, T, T], [F, F, F]])):
        out = attend(backend, torch.zeros_like(v), v, v, structure=hidden)
        assert_rows(out, [[14 / 3] * 3, [0.0] * 3])


@every_backend
def test_10_causal_ends_on_the_last_key(backend: Name) -> None:
    for queries, keys, expected in ((2, (1, 2, 3, 4, 5), [2.5, 3.0]), (5, (4, 8), [0, 0, 0, 4, 6])):
        v = here(batch(keys), backend)
        q = here(torch.zeros(1, queries, 2, 64), backend)
        assert_rows(attend(backend, q, v, v, causal=True), [expected])


@every_backend
def test_10_causal_ends_on_the_last_key_of_each_document(backend: Name) -> None:
    v = here(values(1, 2, 3, 4, 5, 4, 8), backend)
    documents = pa.Packed.from_cu_seqlens([0, 2, 4], [0, 5, 7])
    q = here(torch.zeros(4, 2, 64), backend)
    assert_rows(attend(backend, q, v, v, structure=documents, causal=True), [2.5, 3, 4, 6])


@every_backend
@pytest.mark.parametrize("layout", ["transposed", "packed", "step"])
def test_12_a_strided_v_gives_the_contiguous_bits(backend: Name, layout: str) -> None:
    contiguous = here(strided_values()[0], backend)
    given = strided_values()[1][layout]
    v = torch.empty_strided(given.shape, given.stride(), dtype=contiguous.dtype, device=DEVICE).copy_(contiguous)
    q = here(torch.zeros(1, 6, 2, 4), backend)
    assert v.stride() != contiguous.stride()
    out = attend(backend, q, q, v)
    want = torch.tensor([[25.0, 26, 27, 28], [125, 126, 127, 128]])
    torch.testing.assert_close(out[0, 0].cpu().float(), want, rtol=2e-2, atol=0)
    assert torch.equal(out, attend(backend, q, q, contiguous))
    assert torch.equal(v, contiguous)


@every_backend
def test_12_expanded_keys_and_values(backend: Name) -> None:
    dtype = dtype_of(backend)
    q = drawn(1, 5, 4, 64, dtype=dtype)
    k, v = (drawn(1, 33, 1, 64, dtype=dtype, seed=seed).expand(1, 33, 4, 64) for seed in (1, 2))
    assert_near(attend(backend, q, k, v), exact(q, k.contiguous(), v.contiguous()))


@every_backend
@pytest.mark.parametrize("case", EMPTY)
def test_16_empty_calls_answer_with_zeros_of_the_right_shape(backend: Name, case: str) -> None:
    q_shape, k_shape, structure = EMPTY[case]
    q, k = (here(torch.ones(shape), backend) for shape in (q_shape, k_shape))
    out, lse = attend(backend, q, k, k, structure=structure and structure(), return_lse=True)
    assert torch.equal(out, torch.zeros_like(q))
    assert (out.dtype, out.device) == (q.dtype, q.device)
    assert torch.equal(lse.cpu(), torch.full((*q_shape[:-3], 2, q_shape[-3]), -INF, dtype=torch.float32))


@pytest.mark.parametrize("case", ["no batch", "no queries", "no keys", "an empty document"])
def test_16_compiled_calls_answer_like_eager_ones(case: str) -> None:
    q_shape, k_shape, structure = EMPTY[case]
    given = structure and structure()
    compiled = torch.compile(lambda q, k: pa.attention(q, k, k, structure=given), backend="eager", fullgraph=True)
    q, k = (here(torch.ones(shape), None) for shape in (q_shape, k_shape))
    assert torch.equal(compiled(q, k), torch.zeros_like(q))


@every_backend
def test_16_empty_documents_among_others(backend: Name) -> None:
    v = here(values(1, 3, 5), backend)
    documents = pa.Packed.from_lengths([0, 2, 1, 0], [2, 1, 0, 0])
    assert_rows(attend(backend, torch.zeros_like(v), v, v, structure=documents), [5, 5, 0])


@every_backend
@pytest.mark.parametrize("width", [40, 72, 80, 160, 256, 512])
def test_40_any_head_size_is_served_or_refused_with_those_there_are(backend: Name, width: int) -> None:
    v = here(batch((1, 2, 3, 6), dim=width), backend)
    out = attend(backend, torch.zeros_like(v), v, v)
    assert out.shape == v.shape
    assert_rows(out, [[3.0] * 4])


@every_backend
def test_40_fewer_rows_than_a_quantisation_block(backend: Name) -> None:
    v = here(batch(range(1, 15)), backend)
    assert_rows(attend(backend, torch.zeros_like(v), v, v), [[7.5] * 14])


# 36: pages

TABLES = {
    "as on the host": ([[2, 0, -1]], [3], 56 / 3),
    "a NaN page past the length": ([[2, 0, 3]], [3], 56 / 3),
    "past the pool, past the length": ([[2, 0, 99]], [3], 56 / 3),
    "past the pool": ([[2, 7, -1]], [3], 25.5),
    "far past the pool": ([[2, 2**31 - 1, -1]], [3], 25.5),
    "missing": ([[2, -1, -1]], [3], 25.5),
    "far below": ([[2, -(2**31), 0]], [4], 25.5),
    "longer than its table": ([[2]], [9], 25.5),
    "nothing but wrong ones": ([[9, -5, 4]], [6], 0.0),
}


@every_backend
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=["int32", "int64"])
@pytest.mark.parametrize("case", TABLES)
def test_36_pages_that_only_the_device_knows_and_that_are_not_there_are_hidden(
    backend: Name, case: str, dtype: torch.dtype
) -> None:
    table, lengths, expected = TABLES[case]
    v = here(pool(), backend)
    q = here(torch.zeros(1, 1, 2, 64), backend)
    paged = pa.Paged(torch.tensor(table, dtype=dtype, device=DEVICE), torch.tensor(lengths, device=DEVICE))
    assert_rows(attend(backend, q, v, v, structure=paged), [[expected]])


@every_backend
@pytest.mark.parametrize("table", [
    [[2, 0, -1]], [[2, 0, 3]], [[2, 0, 99]], torch.tensor([[2, 0, -1]]), torch.tensor([[2, 0, -1]], dtype=torch.int32),
], ids=["missing", "nan page", "past the pool", "int64", "int32"])  # fmt: skip
def test_36_only_the_rows_within_the_length_are_read(backend: Name, table) -> None:
    v = here(pool(), backend)
    q = here(torch.zeros(1, 1, 2, 64), backend)
    assert_rows(attend(backend, q, v, v, structure=pa.Paged(table, [3])), [[56 / 3]])


@every_backend
def test_36_a_row_of_length_0_is_zero(backend: Name) -> None:
    v = here(pool(), backend)
    q = here(torch.zeros(2, 1, 2, 64), backend)
    assert_rows(attend(backend, q, v, v, structure=pa.Paged([[3, 0], [2, 0]], [0, 3])), [[0.0], [56 / 3]])


@every_backend
def test_36_many_wrong_entries_among_right_ones_equal_the_reference(backend: Name) -> None:
    pages, size, rows, entries = 40, 16, 6, 9
    draw = torch.Generator().manual_seed(0)
    table = torch.randint(-pages, 2 * pages, (rows, entries), generator=draw)
    lengths = torch.tensor([1, 16, 17, 100, 143, 144])
    q, k, v = (
        drawn(*front, 2, 64, dtype=dtype_of(backend), seed=seed)
        for seed, front in enumerate(((rows, 5), (pages, size), (pages, size)))
    )
    for causal in (False, True):
        given = {"structure": pa.Paged(table.to(DEVICE), lengths.to(DEVICE)), "causal": causal}
        assert_near(attend(backend, q, k, v, **given), exact(q, k, v, **given))


@pytest.mark.parametrize(("table", "error", "words"), [
    ([[2, 7, -1]], ValueError, ("7", "4")),
    ([[2, -1, -1]], ValueError, ("row 0", "slot 1")),
    (torch.tensor([[2.0, 0.0]]), TypeError, ("float32",)),
    (torch.tensor([2, 0]), ValueError, ("[batch, max_pages]", "[2]")),
])  # fmt: skip
def test_36_tables_that_cannot_be_are_refused_by_name(table, error, words) -> None:
    v = here(pool(), None)
    with pytest.raises(error) as refusal:
        pa.attention(here(torch.zeros(1, 1, 2, 64), None), v, v, structure=pa.Paged(table, [3]))
    assert all(word in str(refusal.value) for word in ("block_table", *words))


def test_36_slots_outside_the_pool_are_skipped_when_the_cache_is_written() -> None:
    cache = pa.PagedKVCache(4, 2, 2, 64, torch.bfloat16, DEVICE)
    rows = here(values(1, 2, 3, 4), None)
    cache.write(rows, rows, torch.tensor([0, -1, 8, 7], device=DEVICE))
    assert cache.k[:, :, 0, 0].flatten().tolist() == cache.v[:, :, 1, 5].flatten().tolist() == [1, 0, 0, 0, 0, 0, 0, 4]
