"""Spans: causal, but a query inside a full span sees every key before the span's end."""

import pytest
import torch

import polyattn as pa
from polyattn.structures.spans import Segment

CPU = torch.device("cpu")


def seen(spans, queries, keys, ranges=None):
    """For each query row, how many keys it sees (always the first ones)."""
    structure = pa.Spans([spans], ranges)
    meta = structure.bind(CPU, (1, queries, 1, 8), (1, keys, 1, 8))
    return meta.visible_end(queries, keys)[0].tolist()


@pytest.mark.parametrize(("spans", "queries", "keys", "ranges", "ends"), [
    ([(2, 5)], 8, 8, None, [1, 2, 5, 5, 5, 6, 7, 8]),
    ([(4, 7)], 3, 8, None, [7, 7, 8]),
    ([(2, 7)], 4, 8, [(0, 1, 0), (1, 4, 4)], [1, 7, 7, 7]),
    ([], 4, 4, None, [1, 2, 3, 4]),
    ([(0, 4)], 4, 4, None, [4, 4, 4, 4]),
    ([(0, 2), (2, 4)], 4, 4, None, [2, 2, 4, 4]),
    ([(0, 2)], 5, 2, None, [0, 0, 0, 2, 2]),
    ([], 0, 3, None, []),
], ids=["A", "B", "C", "D", "E", "adjacent", "more-queries-than-keys", "no-query"])  # fmt: skip
def test_the_worked_examples(spans, queries, keys, ranges, ends):
    assert seen(spans, queries, keys, ranges) == ends


def test_segments_cover_the_queries_once_in_order():
    meta = pa.Spans([[(2, 5)], [(1, 3), (6, 8)]]).bind(CPU, (2, 6, 1, 8), (2, 8, 1, 8))
    assert meta.segments(0, 6, 8) == (Segment(0, 3, 5, False), Segment(3, 6, 8, True))
    assert meta.segments(1, 6, 8) == (Segment(0, 1, 3, False), Segment(1, 4, 6, True), Segment(4, 6, 8, False))
    assert meta.groups() == ((0,), (1,))
    assert pa.Spans([[(2, 5)], [(1, 3)], [(2, 5)]]).bind(CPU, (3, 6, 1, 8), (3, 8, 1, 8)).groups() == ((0, 2), (1,))


def test_a_shard_of_a_span_still_reaches_its_global_end():
    meta = pa.Spans([[(2, 7)]], [(0, 2, 3)]).bind(CPU, (1, 2, 1, 8), (1, 8, 1, 8))
    assert meta.segments(0, 2, 8) == (Segment(0, 2, 7, False),)


@pytest.mark.parametrize(("full", "words"), [
    ([[(6, 8), (2, 4)]], ("full[0]", "sorted", "(6, 8)", "(2, 4)")),
    ([[], [(2, 6), (4, 8)]], ("full[1]", "disjoint")),
    ([[(2, 8), (4, 6)]], ("full[0]", "disjoint")),
    ([[(5, 3)]], ("full[0]", "start < end", "[5, 3)")),
    ([[(3, 3)]], ("full[0]", "start < end", "[3, 3)")),
    ([[(-2, 3)]], ("full[0]", "0 <= start", "[-2, 3)")),
    ([[(1, 2, 3)]], ("full[0]", "(start, end) pairs", "(1, 2, 3)")),
])  # fmt: skip
def test_malformed_spans_are_value_errors(full, words):
    with pytest.raises(ValueError) as refusal:
        pa.Spans(full)
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(("full", "words"), [
    ([(2, 5)], "full.*one list of pairs per row"),
    ((2, 5), "full.*wrap each row"),
    (5, "full.*one list"),
    ("25", "full.*one list"),
    ([[(2.0, 5.0)]], "full.*integers"),
    ([[(True, 5)]], "full.*integers"),
    (torch.zeros(1, 1, 2, dtype=torch.int64, device="meta"), "full.*host"),
])  # fmt: skip
def test_spans_of_another_type_are_type_errors(full, words):
    with pytest.raises(TypeError, match=words):
        pa.Spans(full)


def test_spans_may_come_as_a_tensor():
    assert pa.Spans(torch.tensor([[[2, 5]], [[0, 1]]])).full == (((2, 5),), ((0, 1),))


@pytest.mark.parametrize(("full", "words"), [
    ([[(2, 9)]], r"full\[0\]: \[2, 9\) ends past the row's 8 keys"),
    ([], "full: .*0 for 1 rows"),
    ([[], []], "full: .*2 for 1 rows"),
])  # fmt: skip
def test_spans_that_do_not_fit_the_call_are_refused(full, words):
    with pytest.raises(ValueError, match=words):
        pa.Spans(full).check((1, 8, 1, 8), (1, 8, 1, 8))


def test_an_empty_batch_has_no_rows():
    assert pa.Spans([]).bind(CPU, (0, 4, 1, 8), (0, 4, 1, 8)).visible_end(4, 4).shape == (0, 4)


@pytest.mark.parametrize(("ranges", "words"), [
    ([(0, 1, 0), (2, 4, 4)], "contiguously"),
    ([(1, 4, 4)], "contiguously from 0"),
    ([(0, 2, 0), (1, 4, 4)], "contiguously"),
    ([(0, 0, 0)], "contiguously"),
    ([(0, 4, -1)], "contiguously"),
    ([], "at least one"),
    ([(0, 4)], "local_start, local_end, global_start"),
])  # fmt: skip
def test_query_ranges_are_contiguous_from_0(ranges, words):
    with pytest.raises(ValueError, match=f"query_ranges: .*{words}"):
        pa.Spans([[]], ranges)


@pytest.mark.parametrize("ranges", [(0, 1, 0), 3, "014", [(0.0, 1.0, 0.0)], torch.zeros(1, 3, device="meta")], ids=str)
def test_query_ranges_of_another_type_are_type_errors(ranges):
    with pytest.raises(TypeError, match="query_ranges"):
        pa.Spans([[]], ranges)


def test_query_ranges_cover_the_full_local_query_and_stay_within_the_keys():
    short, far = pa.Spans([[]], [(0, 3, 0)]), pa.Spans([[]], [(0, 1, 0), (1, 4, 6)])
    with pytest.raises(ValueError, match="query_ranges: .*full local query, 0 to 4"):
        short.check((1, 4, 1, 8), (1, 8, 1, 8))
    with pytest.raises(ValueError, match="query_ranges: .*global position 9, but there are 8 keys"):
        far.check((1, 4, 1, 8), (1, 8, 1, 8))


def test_what_shapes_derive_is_bounded():
    meta = pa.Spans([[(0, 2)]]).bind(CPU, (1, 2, 1, 8), (1, 2, 1, 8))
    for queries in range(1, 100):
        meta.visible_end(queries, 100)
    assert len(meta._ends) == len(meta._segments) == 32
    assert meta.visible_end(99, 100) is meta.visible_end(99, 100)
