"""Structures are values: frozen, compared by identity, copied as themselves, pickled without what they derived."""

import copy
import pickle

import pytest
import torch

import polyattn as pa
from tests.unit.structures.every import KINDS, SHAPES, one_of_each

CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", KINDS)
def test_fields_cannot_be_set_or_deleted(kind):
    structure = one_of_each()[kind]
    name = type(structure).__name__
    for change in (
        lambda: setattr(structure, "facts", None),
        lambda: setattr(structure, "anything", 1),
        lambda: delattr(structure, "facts"),
    ):
        with pytest.raises(AttributeError, match=f"{name} is frozen"):
            change()


@pytest.mark.parametrize("kind", KINDS)
def test_comparison_is_by_identity(kind):
    one, other = one_of_each()[kind], one_of_each()[kind]
    assert one == one
    assert one != other
    assert len({one, other, one}) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_is_the_structure_itself(kind):
    structure = one_of_each()[kind]
    assert copy.copy(structure) is structure
    assert copy.deepcopy({"shared": [structure]})["shared"][0] is structure


@pytest.mark.parametrize("kind", KINDS)
def test_pickle_keeps_the_meaning_and_drops_what_was_derived(kind):
    structure = one_of_each()[kind]
    structure.bind(CPU, *SHAPES[kind])
    key = structure.route_key
    twin = pickle.loads(pickle.dumps(structure))
    assert type(twin) is type(structure)
    assert (repr(twin), twin.facts, twin.kind) == (repr(structure), structure.facts, structure.kind)
    assert twin.builds == 0
    assert "route_key" not in structure.__getstate__()  # a number of this process alone
    assert twin.route_key == key
    for mine, its in zip(structure.anchors(), twin.anchors(), strict=True):
        assert torch.equal(mine, its)
    twin.check(*SHAPES[kind])


def test_pickle_keeps_shared_boundaries_shared():
    twin = pickle.loads(pickle.dumps(pa.Packed.from_lengths([2, 1])))
    assert twin.cu_k is twin.cu_q


def test_a_packed_with_capacity_is_mutable_and_so_is_copied():
    packed = pa.Packed.from_lengths([2, 1], capacity=(3, 4))
    for twin in (copy.copy(packed), copy.deepcopy(packed)):
        twin.update_([4])
        assert twin.cu_k is twin.cu_q
        assert twin.cu_q.tolist() == [0, 4, 4, 4]
    assert packed.cu_q.tolist() == [0, 2, 3, 3]


def test_a_mask_that_wants_a_gradient_is_not_copied_silently():
    mask = pa.Mask(torch.zeros(1, 4, requires_grad=True))
    with pytest.raises(TypeError, match="gradient"):
        copy.deepcopy(mask)


@pytest.mark.parametrize("kind", KINDS)
def test_route_keys_tell_structures_that_are_routed_differently_apart(kind):
    every = one_of_each()
    assert every[kind].route_key == one_of_each()[kind].route_key
    assert len({structure.route_key for structure in every.values()}) == len(every)


def test_route_keys_follow_facts_not_lengths():
    def key(*lengths):
        return pa.Packed.from_lengths(lengths).route_key

    assert key(2, 1) == key(5, 9)
    assert key(2, 1) != key(2, 1, 1)
    assert pa.Paged([[0]], [1]).route_key != pa.Paged([[0]], [1], [1]).route_key
    assert pa.Packed.from_lengths([2]).route_key != pa.Packed.from_lengths([2], spans=[[]]).route_key


@pytest.mark.parametrize("cls", [pa.KeyPadding, pa.Packed])
def test_structures_with_several_constructors_name_them(cls):
    with pytest.raises(TypeError, match="from_lengths"):
        cls(torch.ones(2, 4, dtype=torch.bool))
