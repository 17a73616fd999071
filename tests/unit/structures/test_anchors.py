"""A compiled graph carries a structure's tensors; the living structure is found by the first, and never another."""

import weakref

import pytest
import torch

import polyattn as pa
from polyattn.structures import anchors
from polyattn.structures.anchors import from_anchor
from tests.unit.structures.every import KINDS, one_of_each

ANCHORED = [kind for kind in KINDS if one_of_each()[kind].anchors()]


@pytest.mark.parametrize("kind", ANCHORED)
def test_a_living_structure_is_found_by_its_first_anchor(kind):
    structure = one_of_each()[kind]
    assert from_anchor(structure.anchors()[0]) is structure


@pytest.mark.parametrize("kind", ANCHORED)
def test_a_dead_structure_is_not_found_and_leaves_nothing_behind(kind):
    structure = one_of_each()[kind]
    anchor, gone = structure.anchors()[0], weakref.ref(structure)
    del structure
    assert gone() is None
    assert id(anchor) not in anchors._living
    assert from_anchor(anchor) is None


def test_an_equal_tensor_or_another_view_finds_nothing():
    packed = pa.Packed.from_lengths([2, 1])
    assert from_anchor(packed.cu_q.clone()) is None
    assert from_anchor(packed.cu_q.view_as(packed.cu_q)) is None


def test_an_id_that_is_used_again_finds_nothing():
    packed = pa.Packed.from_lengths([2, 1])
    stranger = torch.zeros(3)
    anchors._living[id(stranger)] = anchors._living[id(packed.cu_q)]
    try:
        assert from_anchor(stranger) is None
    finally:
        del anchors._living[id(stranger)]


def test_many_short_lives_never_find_each_other():
    for length in range(500):
        packed = pa.Packed.from_lengths([length])
        assert from_anchor(packed.cu_q).lengths_q == (length,)


@pytest.mark.parametrize("kind", ["key_padding", "mask", "packed", "paged", "spans"])
def test_an_anchor_that_was_written_to_finds_nothing(kind):
    structure = one_of_each()[kind]
    structure.anchors()[-1].zero_()
    assert from_anchor(structure.anchors()[0]) is None


def test_update_is_no_such_write():
    packed = pa.Packed.from_lengths([2, 1], capacity=(3, 4))
    packed.update_([1, 1, 1])
    assert from_anchor(packed.cu_q) is packed


def test_boundaries_that_only_a_device_holds_may_be_rewritten():
    boundaries = torch.zeros(3, dtype=torch.int32, device="meta")
    packed = pa.Packed.from_cu_seqlens(boundaries, max_q=4)
    paged = pa.Paged(
        torch.zeros(1, 2, dtype=torch.int32, device="meta"), torch.zeros(1, dtype=torch.int32, device="meta")
    )
    boundaries.add_(1)
    paged.block_table.add_(1)
    assert from_anchor(packed.cu_q) is packed
    assert from_anchor(paged.block_table) is paged


def test_structures_over_one_tensor_are_told_apart():
    boundaries = torch.zeros(3, dtype=torch.int32, device="meta")
    table = torch.zeros(1, 2, dtype=torch.int32, device="meta")
    mask = torch.zeros(1, 1, 2, 2, device="meta")
    pairs = [
        [pa.Packed.from_cu_seqlens(boundaries, max_q=size) for size in (4, 8)],
        [pa.Paged(table, torch.zeros(1, dtype=torch.int32, device="meta")) for _ in range(2)],
        [pa.Mask(mask), pa.Mask(mask)],
    ]
    padding = pa.KeyPadding.from_lengths([4, 2], 4)
    pairs.append([padding, padding.with_queries("all"), padding.with_queries("same")])
    for structures in pairs:
        for structure in structures:
            assert from_anchor(structure.anchors()[0]) is structure
        last = structures.pop()
        del structure
        assert from_anchor(last.anchors()[0]) is last
        assert from_anchor(structures[0].anchors()[0]) is structures[0]


def test_inference_tensors_keep_no_version_and_are_found():
    with torch.inference_mode():
        mask = pa.Mask(torch.zeros(1, 4))
        assert from_anchor(mask.tensor) is mask


@pytest.mark.parametrize("kind", ["key_padding", "mask", "packed", "paged", "block_map"])
def test_from_anchors_rebuilds_the_same_meaning(kind):
    structure = one_of_each()[kind]
    tensors = tuple(tensor.clone() for tensor in structure.anchors())
    if kind == "packed":
        tensors = (tensors[0], tensors[0])
    twin = type(structure).from_anchors(tensors, structure.anchor_ints(), structure.anchor_detail())
    assert (twin.kind, twin.facts) == (structure.kind, structure.facts)
    assert all(torch.equal(mine, its) for mine, its in zip(structure.anchors(), twin.anchors(), strict=True))


@pytest.mark.skipif(
    tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 9),
    reason="an older Dynamo cannot trace object.__new__: there, structures are built outside of graphs",
)
@pytest.mark.parametrize("build", [
    lambda x: pa.KeyPadding.from_mask(x > 0),
    lambda x: pa.KeyPadding.from_lengths((x > 0).sum(1), 3),
    lambda x: pa.Mask(x > 0),
    lambda x: pa.Mask(x),
    lambda x: pa.Packed.from_cu_seqlens((x[0] > 1).cumsum(0, dtype=torch.int32), max_q=3),
    lambda x: pa.Paged((x > 0).int(), (x > 0).sum(1, dtype=torch.int32)),
], ids=["from_mask", "from_lengths", "bool_mask", "additive_mask", "packed", "paged"])  # fmt: skip
def test_structures_are_built_inside_a_compiled_graph_without_a_break(build):
    def anchors_of(x):
        return build(x).anchors()

    x = torch.tensor([[1.0, -1.0, 2.0], [3.0, 2.0, -4.0]])
    traced = torch.compile(anchors_of, backend="eager", fullgraph=True)(x)
    assert [tensor.tolist() for tensor in traced] == [tensor.tolist() for tensor in anchors_of(x)]
