"""Host data stay on the CPU, whatever torch's default device is."""

from __future__ import annotations

import pytest
import torch

import polyattn as pa

CPU = torch.device("cpu")


def build() -> list[pa.structures.Structure]:
    return [
        pa.KeyPadding.from_lengths([3], 4),
        pa.KeyPadding.from_mask([[1, 0, 1, 1]]),
        pa.KeyPadding.from_ranges([[(0, 1), (2, 4)]], 4),
        pa.Packed.from_lengths([2, 2], spans=[[(0, 1)], []]),
        pa.Packed.from_cu_seqlens([0, 2, 4]),
        pa.Mask([True, False, True, True]),
        pa.Mask.pairs([[0.0] * 4] * 4),
        pa.Spans([[(1, 3)]], query_ranges=[(0, 4, 0)]),
        pa.Paged([[1, 0]], [4], [4]),
        pa.BlockMap([[[[0, 1]]]], [[[2]]], 4, 2, sizes=[2, 2]),
    ]


def answers(structures: list[pa.structures.Structure]) -> list[torch.Tensor]:
    q = torch.linspace(-1, 1, 64, device=CPU).reshape(1, 4, 2, 8)
    results = []
    for structure in structures[:-1]:  # a block map needs a backend of its own
        k = q.reshape(2, 2, 2, 8) if structure.kind == "paged" else q
        results.append(pa.attention(q, k, k, structure=structure))
    return results


def test_structures_of_lists_are_on_the_cpu() -> None:
    want = answers(build())
    with torch.device("meta"):
        structures = build()
        for structure in structures:
            structure.to("cpu")
        got = answers(structures)
        derived = pa.KeyPadding.from_mask([[1, 0, 1, 1]]).bind(CPU, (1, 4, 2, 8), (1, 4, 2, 8))
        assert derived.indices.tolist() == [0, 2, 3]
    for structure in structures:
        assert [anchor.device for anchor in structure.anchors()] == [CPU] * len(structure.anchors())
        assert structure.builds == 1
    torch.testing.assert_close(got, want)


def test_slots_given_as_a_list() -> None:
    cache = pa.PagedKVCache(2, 2, 1, 8, torch.float32, "cpu")
    with torch.device("meta"):
        cache.write(torch.ones(1, 1, 8, device=CPU), torch.ones(1, 1, 8, device=CPU), [1])
    assert cache.k[0, 1].sum() == 8


def test_a_mask_on_another_device_names_both() -> None:
    q = torch.randn(1, 4, 2, 8)
    for mask in (torch.ones(4, 4, dtype=torch.bool, device="meta"), torch.zeros(4, 4, device="meta")):
        with pytest.raises(ValueError, match=r"mask: it is on meta, but q is on cpu"):
            pa.attention(q, q, q, structure=pa.Mask.pairs(mask))
