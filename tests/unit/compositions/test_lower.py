"""Lowering: when each composition applies, and what it says when it cannot."""

from dataclasses import replace

import pytest
import torch

from polyattn import structures
from polyattn.compositions import COMPOSITIONS
from polyattn.vendor import Request, StructureFacts, TensorFacts
from tests.unit.compositions.lowering import NAMED, features

DENSE = Request(*(TensorFacts.contiguous((2, 6, 4, 64), "float32") for _ in range(3)))
ROWS = replace(DENSE, **{name: TensorFacts.contiguous((12, 4, 64), "float32") for name in "qkv"})
PACKED = replace(ROWS, structure_kind="packed", structure_facts=StructureFacts(documents=3))
PADDED = replace(
    DENSE,
    structure_kind="key_padding",
    structure_facts=structures.KeyPadding.from_lengths([2, 6], 6, queries="same").facts,
)
HOLES = replace(
    DENSE,
    structure_kind="key_padding",
    structure_facts=structures.KeyPadding.from_mask(
        torch.tensor([[1, 0, 1, 1, 1, 1], [1] * 6]) > 0, queries="same"
    ).facts,
)
PAGED = replace(
    DENSE, structure_kind="paged", structure_facts=StructureFacts(documents=2, page_size=6, query_layout="batched")
)
SPANS = replace(DENSE, structure_kind="spans", structure_facts=StructureFacts(spans=True))
ALL = features("dense", "prefix_kv", "key_padding", "mask", "bias", "packed", "spans", "paged")


def lower(name, request, has=ALL):
    return NAMED[name].lower(request, has)


def on_device(request):
    return replace(request, structure_facts=replace(request.structure_facts, host=False))


def test_they_are_listed_fastest_first():
    names = [composition.name for composition in COMPOSITIONS]
    assert names[0] == "slice"
    assert names[-1] == "mask"
    assert len(set(names)) == len(names)
    assert [c.name for c in COMPOSITIONS if c.cheap] == ["slice", "segments", "pack", "pad", "repeat"]


@pytest.mark.parametrize("name", NAMED)
def test_none_applies_to_a_plain_dense_request(name):
    assert lower(name, DENSE) is None


@pytest.mark.parametrize(("name", "request_", "kinds"), [
    ("loop", PACKED, "dense"), ("rows", PADDED, "dense"), ("pack", PADDED, "packed"), ("segments", SPANS, "dense"),
    ("gather", PAGED, "packed"), ("gather", PAGED, "dense"), ("mask", PADDED, "mask"), ("mask", PACKED, "mask"),
    ("mask", replace(DENSE, causal=True), "mask"),
])  # fmt: skip
def test_only_to_kinds_that_the_slot_takes(name, request_, kinds):
    assert isinstance(lower(name, request_, features(kinds)), Request)
    assert lower(name, request_, features("video_tiles")) is None


@pytest.mark.parametrize(("name", "request_"), [
    ("loop", on_device(PACKED)), ("rows", on_device(PADDED)), ("pack", on_device(PADDED)), ("gather", on_device(PAGED)),
])  # fmt: skip
def test_what_only_the_device_knows_is_refused_with_a_reason(name, request_):
    assert "on the host" in lower(name, request_)


@pytest.mark.parametrize("request_", [on_device(PACKED), on_device(PADDED)])
def test_a_mask_serves_what_only_the_device_knows(request_):
    assert isinstance(lower("mask", request_), Request)


@pytest.mark.parametrize("positions", [{"causal": True}, {"window": (2, 0)}])
@pytest.mark.parametrize("name", ["pack", "rows"])
def test_positions_are_never_moved(name, positions):
    assert isinstance(lower(name, replace(PADDED, **positions)), Request)
    every = replace(PADDED, structure_facts=replace(PADDED.structure_facts, queries="all"), **positions)
    for request in (replace(HOLES, **positions), every):
        assert isinstance(lower(name, request), str)
        assert isinstance(lower("mask", request), Request)
    assert isinstance(lower(name, HOLES), Request)


@pytest.mark.parametrize("name", ["loop", "mask"])
def test_lengths_that_a_graph_would_keep_are_not_captured(name):
    capacity = replace(PACKED, capturing=True, structure_facts=replace(PACKED.structure_facts, capacity=True))
    assert "captured" in lower(name, capacity)
    assert "captured" in lower("gather", replace(PAGED, capturing=True))


def test_a_window_that_would_start_past_the_prefix():
    facts = structures.KeyPadding.from_lengths([2, 2], 6, queries="all").facts
    request = replace(DENSE, structure_kind="prefix_kv", structure_facts=facts, window=(1, 0))
    assert "window (1, 0)" in lower("slice", request)
    assert isinstance(lower("mask", request), Request)


@pytest.mark.parametrize(("dim", "want"), [(40, 64), (64, None), (72, 96), (80, 96), (128, None)])
def test_a_head_dim_goes_to_the_next_listed(dim, want):
    """fault_cases row 40."""
    tensors = {name: TensorFacts.contiguous((2, 6, 4, dim), "float32") for name in "qkv"}
    lowered = lower("pad", replace(DENSE, **tensors), features("dense", head_dims=frozenset({64, 96, 128})))
    assert (lowered and (lowered.head_dim, lowered.v_head_dim)) == (want and (want, want))


@pytest.mark.parametrize("dim", [160, 256, 512])
def test_a_head_dim_above_the_list_says_so(dim):
    tensors = {name: TensorFacts.contiguous((2, 6, 4, dim), "float32") for name in "qkv"}
    text = lower("pad", replace(DENSE, **tensors), features("dense", head_dims=frozenset({64, 96, 128})))
    assert f"head_dim {dim} not in (64, 96, 128)" in text


def test_head_dims_given_as_a_range():
    tensors = {name: TensorFacts.contiguous((2, 6, 4, 20), "float32") for name in "qkv"}
    lowered = lower("pad", replace(DENSE, **tensors), features("dense", head_dims=range(8, 257, 8)))
    assert lowered.head_dim == 24


@pytest.mark.parametrize("name", ["pad", "repeat"])
def test_a_page_pool_is_never_copied_whole(name):
    k = TensorFacts.contiguous((50, 6, 2, 72), "float32")
    request = replace(PAGED, q=TensorFacts.contiguous((2, 6, 4, 72), "float32"), k=k, v=k)
    has = features("paged", gqa=False, head_dims=frozenset({64, 96}))
    assert "all of it" in lower(name, request, has)


def test_everything_else_of_the_request_stays():
    request = replace(
        PACKED,
        scale=0.3,
        softcap=2.0,
        lse=True,
        grad=True,
        deterministic=True,
        device="cuda:1",
        options=("x",),
        out=True,
    )
    lowered = lower("loop", request)
    for field in ("scale", "softcap", "lse", "grad", "deterministic", "device", "options", "causal", "window"):
        assert getattr(lowered, field) == getattr(request, field)
    assert not lowered.out
