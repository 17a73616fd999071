"""A Packed with capacity: routed by its capacity alone, and rewritten in place for graph replay."""

import pytest
import torch

import polyattn as pa

CPU, META = torch.device("cpu"), torch.device("meta")


def test_only_capacities_are_facts():
    one, other = (pa.Packed.from_lengths(lengths, capacity=(4, 8)) for lengths in ([3, 1], [8, 8, 8, 8]))
    assert one.facts == other.facts
    assert one.route_key == other.route_key
    assert (one.max_q, one.max_k, one.facts.documents, one.facts.capacity) == (8, 8, 4, True)
    assert one.cu_q.tolist() == [0, 3, 4, 4, 4]


def test_update_writes_into_the_very_tensors_of_every_device():
    packed = pa.Packed.from_lengths([3, 1], [2, 2], capacity=(3, 4, 6))
    here, there = packed.bind(CPU, (4, 1, 8), (4, 1, 8)), packed.bind(META, (4, 1, 8), (4, 1, 8))
    before = [(id(t), t._version) for t in (packed.cu_q, here.cu_q, here.cu_k, there.cu_q)]
    packed.update_([1, 2, 3], [6, 0, 1])
    assert packed.cu_q.tolist() == here.cu_q.tolist() == [0, 1, 3, 6]
    assert packed.cu_k.tolist() == here.cu_k.tolist() == [0, 6, 6, 7]
    assert here.cu_q is not packed.cu_q
    assert (here.lengths_q, here.lengths_k) == (packed.lengths_q, packed.lengths_k) == ((1, 2, 3), (6, 0, 1))
    after = [(id(t), t._version) for t in (packed.cu_q, here.cu_q, here.cu_k, there.cu_q)]
    assert [tensor for tensor, _ in before] == [tensor for tensor, _ in after]
    assert all(new > old for (_, old), (_, new) in zip(before, after, strict=True))
    assert packed.bind(CPU, (6, 1, 8), (7, 1, 8)) is here
    assert packed.builds == 2


def test_one_set_of_lengths_stays_one():
    packed = pa.Packed.from_lengths([3, 1], capacity=(3, 4))
    meta = packed.bind(CPU, (4, 1, 8), (4, 1, 8))
    packed.update_([2])
    assert packed.cu_k is packed.cu_q
    assert meta.cu_k is meta.cu_q
    assert meta.cu_q.tolist() == [0, 2, 2, 2]
    with pytest.raises(ValueError, match="k: .*one set of lengths"):
        packed.update_([2], [3])


def test_new_totals_are_checked_against_the_next_call():
    packed = pa.Packed.from_lengths([3, 1], capacity=(3, 4))
    packed.bind(CPU, (4, 1, 8), (4, 1, 8))
    packed.update_([4, 4])
    with pytest.raises(ValueError, match="8 rows of q, but q has T=4"):
        packed.bind(CPU, (4, 1, 8), (4, 1, 8))


@pytest.mark.parametrize(("lengths", "words"), [
    (([1, 1, 1, 1],), "q: 4 documents .*capacity of 3 documents of 4 rows"),
    (([5],), "q: 1 documents of at most 5 rows"),
    (([1], [7]), "k: 1 documents of at most 7 rows .*6 rows"),
    (([1, 1], [1]), "k: 2 documents of queries but 1"),
    (([-1],), "q: lengths cannot be negative"),
])  # fmt: skip
def test_what_exceeds_the_capacity_is_refused_and_changes_nothing(lengths, words):
    packed = pa.Packed.from_lengths([3, 1], [2, 2], capacity=(3, 4, 6))
    meta = packed.bind(CPU, (4, 1, 8), (4, 1, 8))
    with pytest.raises(ValueError, match=words):
        packed.update_(*lengths)
    assert packed.cu_q.tolist() == meta.cu_q.tolist() == [0, 3, 4, 4]
    assert packed.lengths_k == meta.lengths_k == (2, 2, 0)


@pytest.mark.parametrize(("capacity", "words"), [
    ((1, 4), "capacity of 1 documents"), ((2, 2), "of 2 rows"), ((2,), "capacity: "), ((2, 4, 4, 4), "capacity: "),
    ((2, -4), "capacity: .*-4"),
])  # fmt: skip
def test_lengths_fit_the_capacity_from_the_start(capacity, words):
    with pytest.raises(ValueError, match=words):
        pa.Packed.from_lengths([3, 1], capacity=capacity)


def test_only_a_packed_with_capacity_is_updated():
    with pytest.raises(ValueError, match="update_: .*capacity="):
        pa.Packed.from_lengths([3, 1]).update_([1])
