"""A structure first used, or built, in inference mode serves calls with gradients later."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.structures.lasting import normal

LOWER = torch.ones(6, 6, dtype=torch.bool).tril()
HOLES = torch.tensor([[1, 1, 0, 1, 0, 1]])
DEAD_ROW = LOWER.clone()
DEAD_ROW[2] = False

STRUCTURES: dict[str, Callable[[], pa.structures.Structure]] = {
    "mask": lambda: pa.Mask.pairs(LOWER),
    "mask of int": lambda: pa.Mask.pairs(LOWER.int()),
    "additive mask": lambda: pa.Mask.pairs(torch.zeros(6, 6).masked_fill(~LOWER, -torch.inf)),
    "wider additive mask": lambda: pa.Mask.pairs(torch.zeros(6, 6, dtype=torch.float64)),
    "mask with a dead row": lambda: pa.Mask.pairs(DEAD_ROW),
    "holes": lambda: pa.KeyPadding.from_mask(HOLES),
    "holes, all queries": lambda: pa.KeyPadding.from_mask(HOLES, queries="all"),
    "ranges": lambda: pa.KeyPadding.from_ranges([[(0, 2), (4, 5)]], 6),
    "lengths": lambda: pa.KeyPadding.from_lengths([4], 6),
    "packed": lambda: pa.Packed.from_lengths([2, 3]),
    "packed spans": lambda: pa.Packed.from_lengths([2, 4], spans=[[(0, 2)], [(1, 3)]]),
    "packed capacity": lambda: pa.Packed.from_lengths([2, 4], capacity=(3, 6)),
    "spans": lambda: pa.Spans([[(1, 4)]]),
    "paged": lambda: pa.Paged([[1, 0]], [6]),
}
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
}


def inputs(structure: pa.structures.Structure) -> list[torch.Tensor]:
    q = torch.randn(1, 6, 2, 8)
    pool = [torch.randn(2, 3, 2, 8) if structure.kind == "paged" else torch.randn(1, 6, 2, 8) for _ in "kv"]
    return [tensor.requires_grad_() for tensor in (q, *pool)]


@pytest.mark.parametrize("backend", ["auto", "blocked,auto"])
@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, rule) for name in STRUCTURES for rule in RULES if not ("spans" in name and rule == "window")],
)
@pytest.mark.parametrize("built_inside", [False, True])
def test_inference_first_then_gradients(name: str, rule: str, backend: str, built_inside: bool) -> None:
    structure = None if built_inside else STRUCTURES[name]()
    with torch.inference_mode():
        structure = structure or STRUCTURES[name]()
        tensors = inputs(structure)
        pa.attention(*tensors, structure=structure, backend=backend, **RULES[rule])
    given, fresh = inputs(structure), STRUCTURES[name]()
    again = [tensor.detach().clone().requires_grad_() for tensor in given]
    out = pa.attention(*given, structure=structure, backend=backend, **RULES[rule])
    want = pa.attention(*again, structure=fresh, backend=backend, **RULES[rule])
    grads = [torch.autograd.grad(result.square().sum(), leaves) for result, leaves in ((out, given), (want, again))]
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(*grads)


def test_a_mask_that_is_an_inference_tensor() -> None:
    with torch.inference_mode():
        structures = [pa.Mask.pairs(mask) for mask in (LOWER.clone(), torch.zeros(6, 6), LOWER.int())]
    for structure in structures:
        assert not structure.tensor.is_inference()
        pa.attention(*inputs(structure), structure=structure).sum().backward()


def test_what_is_sent_ahead_in_inference_mode() -> None:
    padding = pa.KeyPadding.from_mask(HOLES)
    with torch.inference_mode():
        meta = padding.to("cpu").bind(torch.device("cpu"), (1, 6, 2, 8), (1, 6, 2, 8))
    assert not any(tensor.is_inference() for tensor in (meta.keep, meta.seqused, meta.indices, meta.cu_seqlens))


def test_device_data_stay_referenced() -> None:
    with torch.inference_mode():
        boundaries = torch.tensor([0, 2, 4], dtype=torch.int32)
        kept = normal(boundaries[1:])
        assert not kept.is_inference()
        boundaries[2] = 5
    assert kept.tolist() == [2, 5]
    assert normal(kept) is kept


@pytest.mark.parametrize("inside", [False, True])
def test_update_works_in_and_out_of_inference_mode(inside: bool) -> None:
    with torch.inference_mode():
        packed = pa.Packed.from_lengths([2, 4], capacity=(2, 6))
        pa.attention(*inputs(packed), structure=packed)
    with torch.inference_mode(inside):
        packed.update_([5, 1])
    q, k, v = inputs(packed)
    want = pa.attention(q, k, v, structure=pa.Packed.from_lengths([5, 1]))
    torch.testing.assert_close(pa.attention(q, k, v, structure=packed), want)


def test_update_that_raises_changes_nothing() -> None:
    packed = pa.Packed.from_lengths([2, 4], capacity=(2, 6))
    meta = packed.bind(torch.device("cpu"), (6, 2, 8), (6, 2, 8))
    for wrong in ([7, 1], [1, 1, 1], [-1]):
        with pytest.raises(ValueError, match=r"q: "):
            packed.update_(wrong)
    assert packed.lengths_q == meta.lengths_q == (2, 4)
    assert packed.cu_q.tolist() == meta.cu_q.tolist() == [0, 2, 6]


def test_copies_made_in_inference_mode() -> None:
    packed, padding = pa.Packed.from_lengths([2, 4], capacity=(2, 6)), pa.KeyPadding.from_mask(HOLES)
    saved = pickle.dumps((packed, padding, padding.host.indices))
    with torch.inference_mode():
        copies = [deepcopy(packed), *pickle.loads(saved)[:2]]
    for copy in copies:
        assert not any(anchor.is_inference() for anchor in copy.anchors())
        pa.attention(*inputs(copy), structure=copy, causal=True).sum().backward()
    for copy in copies[:2]:
        assert copy.cu_q is copy.cu_k
        copy.update_([6, 0])
        assert copy.lengths_q == (6, 0)


def test_a_cache_made_in_inference_mode_is_written_outside_of_it() -> None:
    with torch.inference_mode():
        cache = deepcopy(pa.PagedKVCache(2, 3, 1, 8, torch.float32, "cpu"))
    cache.write(torch.ones(1, 1, 8), torch.ones(1, 1, 8), [4])
    assert cache.k[1, 1].sum() == 8
