"""A step's structure is worked out once for all layers of a model: the pattern that engines are to follow."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa
from polyattn.structures import Structure
from tests.unit.structures.every import KINDS, SHAPES, one_of_each

LAYERS, STEPS = 40, 3


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Structure's id -> how often it was prepared, and checked against shapes."""
    counts: dict[int, int] = {}
    bind = Structure._prepare_once

    def prepare(self: Structure, *args: object) -> object:
        counts[id(self)] = counts.get(id(self), 0) + 1
        return bind(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Structure, "_prepare_once", prepare)
    return counts


def made(kind: str) -> Structure:
    """One of each; of two video tiles one is kept, for all of them would be a dense call."""
    if kind == "video_tiles":
        return pa.VideoTiles(pa.VideoLayout((2, 2, 2), prefix=(2,)), (1, 2, 2), topk=1)
    return one_of_each()[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_40_layers_prepare_a_structure_once_a_step(kind: str, counted: dict[int, int]) -> None:
    q_shape, k_shape = SHAPES[kind]
    layers = [pa.Attention(q_shape[-2], q_shape[-1]) for _ in range(LAYERS)]
    q, k = torch.randn(q_shape), torch.randn(k_shape)
    steps = [made(kind) for _ in range(STEPS)]  # all alive, so that each has an id of its own
    for structure in steps:
        for layer in layers:
            layer(q, k, k, structure)
        if kind == "dense":  # nothing to prepare
            assert structure.builds <= 1
            continue
        assert structure.builds == 1
        assert counted[id(structure)] == 1, "the other layers do not even ask"


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_other_head_counts_share_what_is_prepared(kind: str) -> None:
    (*rows, heads, dim), k_shape = SHAPES[kind]
    structure = made(kind)
    for more in (1, 2):
        q, k = torch.randn(*rows, heads * more, dim), torch.randn(*k_shape)
        pa.attention(q, k, k, structure=structure)
    assert structure.builds <= 1
