"""Paged: a block table of any integer dtype; what is past a row's length never matters."""

import numpy
import pytest
import torch

import polyattn as pa

CPU, META = torch.device("cpu"), torch.device("meta")
POOL = (4, 2, 1, 8)  # pages, page_size, Hk, D


@pytest.mark.parametrize("table", [
    [[2, 0], [1, -1]], ([2, 0], (1, -1)), numpy.array([[2, 0], [1, -1]]), torch.tensor([[2, 0], [1, -1]]),
    torch.tensor([[2, 0], [1, -1]], dtype=torch.int16), [torch.tensor([2, 0]), numpy.array([1, -1])],
], ids=lambda table: type(table).__name__)  # fmt: skip
def test_every_form_of_a_table_means_the_same(table):
    paged = pa.Paged(table, [3, 2])
    assert paged.block_table.tolist() == [[2, 0], [1, -1]]
    assert paged.block_table.dtype == torch.int32
    assert paged.host_table == ((2, 0), (1, -1))
    meta = paged.bind(CPU, (2, 1, 1, 8), POOL)
    assert (meta.host_kv, meta.host_q, meta.q_lengths) == ((3, 2), None, None)


def test_queries_may_have_lengths():
    paged = pa.Paged([[2, 0], [1, -1]], [3, 2], [2, 1])
    packed, padded = paged.bind(CPU, (3, 1, 8), POOL), paged.bind(CPU, (2, 5, 1, 8), POOL)
    assert packed is padded
    assert packed.cu_q.tolist() == [0, 2, 3]
    assert packed.cu_q.dtype == torch.int32


@pytest.mark.parametrize("table", [[[2, 0, 99]], [[2, 0, -7]], [[2, 0, 2**40]], [[2, 0, -(2**40)]]])
def test_entries_past_the_length_never_matter(table):
    paged = pa.Paged(table, [3])
    paged.check((1, 1, 1, 8), POOL)
    assert paged.block_table.tolist()[0][:2] == [2, 0]
    last = paged.block_table[0, 2].item()
    assert last < 0 or last >= 4  # it named no page, and does not wrap around to one


@pytest.mark.parametrize(("table", "lengths", "words"), [
    ([[2, 7, -1]], [3], ("block_table", "row 0", "slot 1", "7", "4 pages")),
    ([[0], [4]], [1, 1], ("block_table", "row 1", "slot 0", "4", "4 pages")),
    ([[2, -1, -1]], [3], ("block_table", "row 0", "slot 1", "-1")),
    ([[0, 1], [1, -3]], [1, 4], ("block_table", "row 1", "slot 1", "-3")),
    ([[0, 1]], [5], ("block_table", "row 0", "3 pages", "5 keys", "2 entries")),
    ([[]], [1], ("block_table", "row 0", "1 pages", "0 entries")),
])  # fmt: skip
def test_pages_that_are_read_must_exist(table, lengths, words):
    with pytest.raises(ValueError) as refusal:
        pa.Paged(table, lengths).bind(CPU, (len(lengths), 1, 1, 8), POOL)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_row_without_keys_reads_no_page():
    for table in ([[9]], [[-1]], [[]], torch.empty(1, 0, dtype=torch.int32)):
        pa.Paged(table, [0]).bind(CPU, (1, 1, 1, 8), POOL)
    assert pa.Paged([], []).bind(CPU, (0, 1, 1, 8), POOL).block_table.shape == (0, 0)


@pytest.mark.parametrize(("table", "error", "words"), [
    (torch.zeros(1, 2), TypeError, "block_table.*float32"),
    (torch.zeros(1, 2, device="meta"), TypeError, "block_table.*float32"),
    ([[0.0]], TypeError, "block_table.*float"),
    ([[True]], TypeError, "block_table.*bool"),
    (numpy.zeros((1, 2)), TypeError, "block_table.*float64"),
    ([2, 0], ValueError, r"block_table.*\[batch, max_pages\]"),
    (torch.tensor([2, 0]), ValueError, r"block_table.*\[batch, max_pages\].*\[2\]"),
    (numpy.array([2, 0]), ValueError, r"block_table.*\[batch, max_pages\].*\[2\]"),
    (torch.zeros(2, dtype=torch.int32, device="meta"), ValueError, r"block_table.*\[batch, max_pages\].*\[2\]"),
    ([[0, 1], [2]], ValueError, r"block_table.*rows of 1 to 2"),
    ("table", TypeError, "block_table"),
])  # fmt: skip
def test_other_tables_are_refused(table, error, words):
    with pytest.raises(error, match=words):
        pa.Paged(table, [1])


@pytest.mark.parametrize(("arguments", "words"), [
    (([[0], [1]], [1]), "kv_lengths: .*1 for 2 rows"),
    (([[0], [1]], [1, 1], [1]), "q_lengths: .*1 for 2 rows"),
    (([[0]], [1], [2]), "kv_lengths: row 0 has 1 keys for 2 queries.*new tokens"),
    (([[0]], [1], None, [[(0, 2)]]), r"spans\[0\]: \[0, 2\) ends past the row's 1 keys"),
    (([[0]], [1], None, [[], []]), "spans: .*2 for 1 rows"),
    (([[0]], torch.ones(1, dtype=torch.int32, device="meta"), None, [[]]), "spans: .*on the host"),
])  # fmt: skip
def test_arguments_that_contradict_each_other_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        pa.Paged(*arguments)


@pytest.mark.parametrize(("q_lengths", "q_shape", "words"), [
    (None, (2, 1, 8), "q_lengths: packed queries"),
    (None, (3, 1, 1, 8), "block_table: 2 rows are given, but q has batch 3"),
    ([1, 1], (3, 1, 8), "q_lengths: they sum to 2, but q has T=3"),
    ([1, 2], (2, 1, 1, 8), "q_lengths: 2 is more than q's Sq=1"),
])  # fmt: skip
def test_queries_that_do_not_fit_are_refused(q_lengths, q_shape, words):
    with pytest.raises(ValueError, match=words):
        pa.Paged([[0], [1]], [1, 2], q_lengths).check(q_shape, POOL)


def test_spans_are_a_fact_even_where_none_is_full():
    assert pa.Paged([[0]], [1], spans=[[]]).facts.spans
    assert not pa.Paged([[0]], [1]).facts.spans


def test_device_data_is_trusted_and_referenced():
    table = torch.zeros(2, 3, dtype=torch.int32, device="meta")
    lengths = torch.zeros(2, dtype=torch.int64, device="meta")
    paged = pa.Paged(table, lengths, lengths)
    assert (paged.facts.host, paged.host_table, paged.host_kv, paged.host_q) == (False, None, None, None)
    version = paged.block_table._version
    table.add_(1)  # graph replay: the next step's pages
    assert paged.block_table._version > version
    assert paged.bind(META, (2, 1, 1, 8), POOL).cu_q.shape == (3,)


def test_host_tables_with_lengths_on_a_device_are_not_judged():
    pa.Paged([[2, 9]], torch.ones(1, dtype=torch.int32, device="meta")).check((1, 1, 1, 8), POOL)


def test_a_pool_without_a_page_serves_rows_without_keys():
    pool = torch.zeros(0, 16, 2, 8)
    out = pa.attention(torch.ones(2, 3, 4, 8), pool, pool, structure=pa.Paged([[-1], [-1]], [0, 0]))
    assert out.eq(0).all()
