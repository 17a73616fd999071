"""A compiled graph carries a structure's number and its tensors: the living one is found, or an equal one is built."""

import copy
import pickle
import weakref

import pytest
import torch

import polyattn as pa
from polyattn.structures import anchors
from polyattn.structures.anchors import living
from tests.unit.structures.every import KINDS, one_of_each

ANCHORED = [kind for kind in KINDS if one_of_each()[kind].anchors()]


@pytest.mark.parametrize("kind", ANCHORED)
def test_a_living_structure_is_found_by_its_handle_or_any_copy_of_it(kind):
    structure = one_of_each()[kind]
    for handle in (structure.handle, structure.handle.clone(), structure.handle.detach(), structure.handle.view(1)):
        assert living(handle) is structure
    assert living(None) is None


@pytest.mark.parametrize("kind", ANCHORED)
def test_a_dead_structure_is_not_found_and_leaves_nothing_behind(kind):
    structure = one_of_each()[kind]
    handle, gone = structure.handle, weakref.ref(structure)
    del structure
    assert gone() is None
    assert int(handle) not in anchors._living
    assert living(handle) is None


def test_many_short_lives_never_find_each_other():
    handles = []
    for length in range(500):
        packed = pa.Packed.from_lengths([length])
        assert living(packed.handle).lengths_q == (length,)
        handles.append(packed.handle)
    assert all(living(handle) is None for handle in handles[:-1])


@pytest.mark.parametrize("kind", ["key_padding", "mask", "packed", "paged", "spans"])
def test_a_structure_whose_data_were_written_to_is_not_found(kind):
    structure = one_of_each()[kind]
    structure.anchors()[-1].zero_()
    assert living(structure.handle) is None


def test_update_is_no_such_write():
    packed = pa.Packed.from_lengths([2, 1], capacity=(3, 4))
    packed.update_([1, 1, 1])
    assert living(packed.handle) is packed


def test_boundaries_that_only_a_device_holds_may_be_rewritten():
    boundaries = torch.zeros(3, dtype=torch.int32, device="meta")
    packed = pa.Packed.from_cu_seqlens(boundaries, max_q=4)
    paged = pa.Paged(
        torch.zeros(1, 2, dtype=torch.int32, device="meta"), torch.zeros(1, dtype=torch.int32, device="meta")
    )
    boundaries.add_(1)
    paged.block_table.add_(1)
    assert living(packed.handle) is packed
    assert living(paged.handle) is paged


def test_structures_over_one_tensor_and_copies_are_told_apart():
    boundaries = torch.zeros(3, dtype=torch.int32, device="meta")
    padding = pa.KeyPadding.from_lengths([4, 2], 4)
    packed = [pa.Packed.from_cu_seqlens(boundaries, max_q=size) for size in (4, 8)]
    capacity = pa.Packed.from_lengths([2, 1], capacity=(3, 4))
    several = [*packed, padding, padding.with_queries("all"), padding.with_queries("same"), capacity]
    several += [copy.deepcopy(capacity), pickle.loads(pickle.dumps(padding))]
    assert [living(structure.handle) for structure in several] == several


def test_a_handle_is_a_cpu_tensor_of_the_usual_kind_wherever_it_is_made():
    with torch.inference_mode(), torch.device("meta"):
        handle = pa.Packed.from_cu_seqlens(torch.zeros(3, dtype=torch.int32), max_q=4).handle
    assert handle.device.type == "cpu"
    assert not handle.is_inference()


def rebuilt(structure):
    tensors = tuple(tensor.clone() for tensor in structure.anchors())
    return type(structure).from_anchors(tensors, structure.anchor_ints(), structure.anchor_detail())


@pytest.mark.parametrize("kind", ANCHORED)
def test_from_anchors_rebuilds_the_same_meaning(kind):
    structure = one_of_each()[kind]
    twin = rebuilt(structure)
    assert (twin.kind, twin.facts) == (structure.kind, structure.facts)
    assert all(torch.equal(mine, its) for mine, its in zip(structure.anchors(), twin.anchors(), strict=True))


@pytest.mark.parametrize(
    "structure",
    [
        pa.Packed.from_lengths([4, 2], [5, 3], spans=[[(1, 3)], []]),
        pa.Paged([[0, 1, 2]], [6], spans=[[(1, 4)]]),
        pa.Paged([[0, 1, 2]], [6], [2], spans=[[(1, 4)]]),
        pa.Spans([[(2, 5)], []], query_ranges=[(0, 1, 0), (1, 4, 4)]),
    ],
    ids=repr,
)
def test_spans_survive_the_way_through_a_graph(structure):
    twin = rebuilt(structure)
    for name in ("spans", "full", "query_ranges", "host_q"):
        assert getattr(twin, name, None) == getattr(structure, name, None)


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
