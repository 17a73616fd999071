"""Data on a device is trusted: building, checking and deriving never read it; `check=True` reads it once, then."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import polyattn as pa

BUILDS = {
    "KeyPadding.from_lengths": lambda d, **kw: pa.KeyPadding.from_lengths(torch.tensor([4, 2], device=d), 4, **kw),
    "KeyPadding.from_mask": lambda d, **kw: pa.KeyPadding.from_mask(torch.ones(2, 4, dtype=torch.bool, device=d), **kw),
    "KeyPadding.from_mask(int)": lambda d, **kw: pa.KeyPadding.from_mask(torch.ones(2, 4, device=d).long(), **kw),
    "Mask(bool)": lambda d, **kw: pa.Mask(torch.ones(2, 4, dtype=torch.bool, device=d)),
    "Mask(float)": lambda d, **kw: pa.Mask(torch.zeros(2, 2, 4, 4, device=d), **kw),
    "Mask.pairs": lambda d, **kw: pa.Mask.pairs(torch.zeros(4, 4, device=d), **kw),
    "Packed.from_cu_seqlens": lambda d, **kw: pa.Packed.from_cu_seqlens(torch.tensor([0, 6], device=d), max_q=6, **kw),
    "Paged": lambda d, **kw: pa.Paged(
        torch.tensor([[0], [1]], device=d), torch.tensor([2, 1], device=d), torch.tensor([1, 1], device=d), **kw
    ),
    "BlockMap": lambda d, **kw: pa.BlockMap(
        torch.zeros(1, 1, 1, 1, device=d).long(), torch.ones(1, 1, 1, device=d).long(), 4, 4, **kw
    ),
}  # fmt: skip
DENSE = (2, 4, 2, 8), (2, 4, 2, 8)
SHAPES = {"Packed.from_cu_seqlens": ((6, 2, 8), (6, 2, 8)), "Paged": ((2, 1, 2, 8), (2, 2, 2, 8))}


@pytest.mark.parametrize("build", BUILDS)
def test_device_data_is_never_read(build):
    with FakeTensorMode():
        structure = BUILDS[build]("cuda")
        meta = structure.bind(torch.device("cuda", 0), *SHAPES.get(build, DENSE))
        if meta is not None and structure.kind != "key_padding":
            meta.complete()
        structure.route_key, repr(structure)


@pytest.mark.parametrize("build", [build for build in BUILDS if build != "Mask(bool)"])
def test_the_trap_of_the_test_above_closes_on_a_read(build):
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        BUILDS[build](torch.device("cuda"), check=True)


@pytest.mark.parametrize("build", BUILDS)
def test_deriving_on_meta_tensors_needs_no_data(build):
    structure = BUILDS[build]("meta")
    assert not structure.facts.host or build == "BlockMap"
    structure.bind(torch.device("meta"), *SHAPES.get(build, DENSE))


@pytest.mark.parametrize("make", [
    lambda: pa.KeyPadding.from_lengths([4, 2], 4),
    lambda: pa.KeyPadding.from_ranges([[(0, 1), (2, 4)], []], 4),
    lambda: pa.Mask([[0.0, float("-inf"), 0.0, 0.0]] * 2),
    lambda: pa.Packed.from_lengths([4, 2]),
    lambda: pa.Packed.from_lengths([4, 2], capacity=(3, 4)),
    lambda: pa.Paged([[0], [1]], [2, 1], [1, 1]),
    lambda: pa.Spans([[(1, 3)], []]),
])  # fmt: skip
def test_host_data_goes_one_way(make):
    with FakeTensorMode():
        structure = make()
        shapes = {"packed": ((6, 2, 8), (6, 2, 8)), "paged": ((2, 1, 2, 8), (2, 2, 2, 8))}.get(structure.kind, DENSE)
        meta = structure.bind(torch.device("cuda", 0), *shapes)
        meta.complete()
        if structure.kind == "spans":
            assert meta.visible_end(4, 4).device.type == "cuda"


def test_what_a_fake_mode_derived_is_not_found_afterwards():
    with FakeTensorMode(allow_non_fake_inputs=True):
        padding = pa.KeyPadding.from_lengths(torch.tensor([4, 2], device="cuda"), 4)
        padding.bind(torch.device("cuda", 0), *DENSE)
    assert not padding._bound
    assert not padding._prepared


def test_check_reads_device_data_once_and_then_knows_it(monkeypatch):
    pretend_device(monkeypatch)
    assert pa.KeyPadding.from_mask(torch.tensor([[True, False]])).ranges is None
    assert pa.KeyPadding.from_mask(torch.tensor([[True, False]]), check=True).host.lengths == (1,)
    assert pa.KeyPadding.from_lengths(torch.tensor([1]), 2, check=True).ranges == (((0, 1),),)
    assert pa.Packed.from_lengths(torch.tensor([1, 2]), check=True).lengths_q == (1, 2)
    assert pa.Packed.from_cu_seqlens(torch.tensor([0, 1, 3]), check=True).lengths_q == (1, 2)
    assert pa.Packed.from_position_ids(torch.tensor([0, 0, 1]), check=True).lengths_q == (1, 2)
    paged = pa.Paged(torch.tensor([[1, 0]]), torch.tensor([3]), torch.tensor([1]), check=True)
    assert (paged.host_table, paged.host_kv, paged.host_q) == (((1, 0),), (3,), (1,))


@pytest.mark.parametrize("bad", [
    lambda check: pa.Packed.from_cu_seqlens(torch.tensor([0, 4, 3]), max_q=4, check=check),
    lambda check: pa.KeyPadding.from_lengths(torch.tensor([-1]), 4, check=check),
    lambda check: pa.Mask(torch.tensor([0.0, float("nan")]), check=check),
    lambda check: pa.Paged(torch.tensor([[0]]), torch.tensor([-1]), check=check),
    lambda check: pa.BlockMap(torch.tensor([[[[0]]]]), torch.tensor([[[2]]]), 4, 4, check=check),
])  # fmt: skip
def test_device_data_is_judged_only_when_asked(bad, monkeypatch):
    pretend_device(monkeypatch)
    bad(False)
    with pytest.raises(ValueError):
        bad(True)


def pretend_device(monkeypatch):
    """Make the constructors take every tensor for one on a device."""
    from polyattn.structures import block_map, key_padding, mask, packed, paged

    for module in (block_map, key_padding, mask, packed, paged):
        monkeypatch.setattr(module, "on_host", lambda data: not isinstance(data, torch.Tensor))
