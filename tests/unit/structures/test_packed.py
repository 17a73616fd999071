"""Packed: documents by lengths, boundaries, positions, nested tensors, or one real part and its padding."""

import pytest
import torch

import polyattn as pa

CPU = torch.device("cpu")


def test_lengths_become_boundaries():
    packed = pa.Packed.from_lengths([2, 0, 3], [1, 4, 0])
    assert (packed.cu_q.tolist(), packed.cu_k.tolist()) == ([0, 2, 2, 5], [0, 1, 5, 5])
    assert (packed.max_q, packed.max_k) == (3, 4)
    assert packed.cu_q.dtype == packed.cu_k.dtype == torch.int32
    assert packed.facts.documents == 3
    assert packed.facts.host
    assert not packed.facts.same_lengths
    meta = packed.bind(CPU, (5, 2, 8), (5, 2, 8))
    assert (meta.lengths_q, meta.lengths_k, meta.spans) == ((2, 0, 3), (1, 4, 0), None)


def test_keys_share_the_queries_boundaries_unless_given():
    packed = pa.Packed.from_lengths([2, 3])
    assert packed.cu_k is packed.cu_q
    assert packed.facts.same_lengths
    meta = packed.bind(CPU, (5, 2, 8), (5, 2, 8))
    assert meta.cu_k is meta.cu_q


@pytest.mark.parametrize(("packed", "boundaries"), [
    (pa.Packed.from_lengths([]), [0]),
    (pa.Packed.from_lengths([0]), [0, 0]),
    (pa.Packed.from_cu_seqlens([0]), [0]),
    (pa.Packed.from_position_ids([]), [0]),
    (pa.Packed.from_position_ids([0, 1, 2, 0, 0, 1]), [0, 3, 4, 6]),
    (pa.Packed.from_position_ids(torch.tensor([[5, 6, 0, 1]])), [0, 2, 4]),
    (pa.Packed.real_and_pad(4, 6), [0, 4]),
    (pa.Packed.real_and_pad(0, 6), [0, 0]),
])  # fmt: skip
def test_every_constructor_and_its_smallest_cases(packed, boundaries):
    assert packed.cu_q.tolist() == boundaries
    assert packed.facts.documents == len(boundaries) - 1


def test_a_jagged_nested_tensor_gives_its_boundaries():
    nested = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 1, 4)], layout=torch.jagged)
    packed = pa.Packed.from_nested(nested)
    assert packed.lengths_q == (3, 1, 4)
    packed.check(nested.values().shape, nested.values().shape)


def test_nested_tensors_whose_rows_do_not_follow_each_other_are_refused():
    jagged = torch.nested.nested_tensor([torch.randn(n, 2, 8) for n in (3, 1)], layout=torch.jagged)
    narrow = torch.nested.narrow(
        torch.randn(2, 5, 8), 1, torch.tensor([0, 1]), torch.tensor([3, 2]), layout=torch.jagged
    )
    for holes in (narrow, jagged.transpose(1, 2)):
        with pytest.raises(ValueError, match=r"nested: .*contiguous"):
            pa.Packed.from_nested(holes)
    for other in (torch.randn(2, 3), [torch.randn(3)]):
        with pytest.raises(TypeError, match="nested: a jagged nested tensor"):
            pa.Packed.from_nested(other)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_strided_nested_tensor_is_refused():
    with pytest.raises(TypeError, match=r"nested: .*strided"):
        pa.Packed.from_nested(torch.nested.nested_tensor([torch.randn(3, 8)], layout=torch.strided))


def test_real_and_pad_is_one_document_in_tensors_of_a_told_size():
    packed = pa.Packed.real_and_pad(4, 6, 2, 3)
    assert (packed.cu_q.tolist(), packed.cu_k.tolist()) == ([0, 4], [0, 2])
    packed.check((6, 2, 8), (3, 2, 8))
    for q, k, words in ((5, 3, "told 6 rows, but q has T=5"), (6, 4, "told 3 rows, but k has T=4")):
        with pytest.raises(ValueError, match=words):
            packed.check((q, 2, 8), (k, 2, 8))
    assert pa.Packed.real_and_pad(4, 6).facts.same_lengths


@pytest.mark.parametrize(("make", "words"), [
    (lambda: pa.Packed.from_lengths([1, 2], [3]), ("k", "2 documents", "1 of keys")),
    (lambda: pa.Packed.from_cu_seqlens([0, 2], [0, 1, 2]), ("k", "1 documents", "2 of keys")),
    (lambda: pa.Packed.from_cu_seqlens([]), ("cu_q", "leading 0")),
    (lambda: pa.Packed.from_cu_seqlens([1, 2]), ("cu_q", "start at 0", "got 1")),
    (lambda: pa.Packed.from_cu_seqlens([0, 4, 3]), ("cu_q", "non-decreasing", "4 then 3 at 2")),
    (lambda: pa.Packed.from_cu_seqlens([0, 3], [0, -1]), ("cu_k", "non-decreasing", "0 then -1")),
    (lambda: pa.Packed.from_cu_seqlens([0, 2**31]), ("cu_q", "2147483648", "int32 limit 2147483647")),
    (lambda: pa.Packed.from_cu_seqlens([0, 4, 6], max_q=3), ("max_q", "3", "longest document", "4")),
    (lambda: pa.Packed.from_cu_seqlens([0, 4], [0, 6], 4, 5), ("max_k", "5", "6")),
    (lambda: pa.Packed.from_cu_seqlens([0, 4], max_q=-1), ("max_q", "-1")),
    (lambda: pa.Packed.from_position_ids([0, 1, -1]), ("position_ids", "negative")),
    (lambda: pa.Packed.from_position_ids(torch.zeros(3, 1, 4, dtype=torch.int64)), ("position_ids", "[T] or [1, T]")),
    (lambda: pa.Packed.real_and_pad(7, 6), ("real", "6", "7")),
    (lambda: pa.Packed.real_and_pad(4, 6, 4, 3), ("k_real", "3", "4")),
    (lambda: pa.Packed.real_and_pad(-1, 6), ("real", "-1")),
    (lambda: pa.Packed.from_lengths([4, 2], spans=[[(1, 3)]]), ("spans", "1 for 2 rows")),
    (lambda: pa.Packed.from_lengths([4, 2], spans=[[], [(1, 3)]]), ("spans[1]", "[1, 3)", "2 keys")),
    (lambda: pa.Packed.from_lengths([4, 2], spans=[[], []], capacity=(2, 4)), ("capacity", "spans")),
])  # fmt: skip
def test_what_cannot_be_is_a_value_error_that_names_it(make, words):
    with pytest.raises(ValueError) as refusal:
        make()
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize(("make", "name"), [
    (lambda: pa.Packed.real_and_pad(True, 6), "real"),
    (lambda: pa.Packed.real_and_pad(4.0, 6), "real"),
    (lambda: pa.Packed.from_cu_seqlens([0, 4], max_q=4.0), "max_q"),
    (lambda: pa.Packed.from_lengths([4, 2], spans=[(1, 3)]), "spans"),
])  # fmt: skip
def test_what_is_of_another_type_is_a_type_error_that_names_it(make, name):
    with pytest.raises(TypeError, match=name):
        make()


def test_documents_that_hold_more_rows_than_the_tensors_are_refused():
    packed = pa.Packed.from_lengths([4, 2], [1, 2])
    packed.check((6, 2, 8), (3, 2, 8))
    packed.check((9, 2, 8), (9, 2, 8))
    for q, k, words in ((5, 3, "6 rows of q, but q has T=5"), (6, 2, "3 rows of k, but k has T=2")):
        with pytest.raises(ValueError, match=words):
            packed.check((q, 2, 8), (k, 2, 8))


def test_spans_are_a_fact_even_where_none_is_full():
    assert pa.Packed.from_lengths([4, 2], spans=[[], []]).facts.spans
    assert not pa.Packed.from_lengths([4, 2]).facts.spans


DEVICE = torch.zeros(3, dtype=torch.int64, device="meta")


def test_boundaries_on_a_device_are_trusted_and_need_max_q():
    packed = pa.Packed.from_cu_seqlens(DEVICE, max_q=7)
    assert (packed.max_q, packed.max_k, packed.facts.documents) == (7, 7, 2)
    assert packed.cu_q.dtype == torch.int32
    assert (packed.lengths_q, packed.facts.host, packed.facts.same_lengths) == (None, False, True)
    assert pa.Packed.from_cu_seqlens(DEVICE, DEVICE, 7, 7).facts.same_lengths
    assert not pa.Packed.from_cu_seqlens(DEVICE, DEVICE.clone(), 7, 9).facts.same_lengths


@pytest.mark.parametrize(("make", "words"), [
    (lambda: pa.Packed.from_cu_seqlens(DEVICE), ("max_q", "never read back")),
    (lambda: pa.Packed.from_cu_seqlens(DEVICE, DEVICE, 7), ("max_k",)),
    (lambda: pa.Packed.from_cu_seqlens(DEVICE, [0, 1, 2], 7, 7), ("cu_q, cu_k", "both")),
    (lambda: pa.Packed.from_cu_seqlens(DEVICE, DEVICE[:2], 7, 7), ("cu_k", "2 documents", "1 of keys")),
    (lambda: pa.Packed.from_cu_seqlens(DEVICE[:0], max_q=7), ("cu_q", "leading 0")),
    (lambda: pa.Packed.from_cu_seqlens(DEVICE[None], max_q=7), ("cu_q", "[documents + 1]", "[1, 3]")),
    (lambda: pa.Packed.from_cu_seqlens(DEVICE, max_q=7, spans=[[], []]), ("spans", "host")),
    (lambda: pa.Packed.from_cu_seqlens(DEVICE, max_q=7, capacity=(2, 7)), ("capacity", "host")),
    (lambda: pa.Packed.from_lengths(DEVICE), ("q", "meta", "from_cu_seqlens")),
    (lambda: pa.Packed.from_position_ids(DEVICE), ("position_ids", "meta", "check=True")),
])  # fmt: skip
def test_what_would_need_a_read_of_device_data_is_refused(make, words):
    with pytest.raises(ValueError) as refusal:
        make()
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_float_boundaries_on_a_device_are_refused_without_reading_them():
    with pytest.raises(TypeError, match=r"cu_q \(cu_seqlens\): .*float32"):
        pa.Packed.from_cu_seqlens(DEVICE.float(), max_q=7)
