"""flex: its blocks let through what is visible and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from polyattn import KeyPadding, Packed, Spans
from polyattn.backends import flex_blocks
from polyattn.vendor import (
    visibility,
)
from tests.emulators.cuda import flex_hop
from tests.unit.backends.flex_calls import drawn

CPU = torch.device("cpu")


def pairs(blocks: flex_blocks.Blocks, batch: int, heads: int, queries: int, keys: int) -> torch.Tensor:
    b, h = torch.arange(batch).view(-1, 1, 1, 1), torch.arange(heads).view(-1, 1, 1)
    return flex_hop._visible(
        blocks.mask(queries, keys),
        (batch, heads, queries, keys),
        b,
        h,
        torch.arange(queries).view(-1, 1),
        torch.arange(keys),
    )


SEEN = {
    "causal": lambda: visibility.of_positions(300, 400, True, None, CPU),
    "causal_fewer_keys": lambda: visibility.of_positions(400, 130, True, None, CPU),
    "window": lambda: visibility.of_positions(512, 512, False, (70, 3), CPU),
    "whole_blocks": lambda: visibility.of_positions(256, 384, False, (None, None), CPU),
    "packed": lambda: visibility.of_packed(
        Packed.from_lengths([130, 0, 60, 200], [128, 5, 0, 190]).bind(CPU, (400, 1, 64), (330, 1, 64)),
        400, 330, False, None,
    ),
    "holes": lambda: visibility.of_key_padding(
        KeyPadding.from_ranges([[(3, 140), (260, 300)], []], 300).bind(CPU, (2, 300, 1, 64), (2, 300, 1, 64)),
        300, 300, True, None,
    ),
    "spans": lambda: visibility.of_spans(
        Spans([[(10, 300)], [(130, 150), (200, 390)]]).bind(CPU, (2, 390, 1, 64), (2, 390, 1, 64)), 390, 390
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_blocks_let_through_what_is_visible_and_nothing_else(name: str) -> None:
    seen = SEEN[name]()
    batch = max(seen.first.shape[0], 1 if seen.keep is None else seen.keep.shape[0])
    queries = seen.first.shape[1] if seen.asked is None else seen.asked.shape[1]
    queries = {"whole_blocks": 256}.get(name, queries)
    blocks = flex_blocks.of_visibility(seen, batch, queries)
    want = seen.mask.expand(batch, 1, queries, seen.keys)
    assert torch.equal(pairs(blocks, batch, 1, queries, seen.keys), want)


def test_blocks_that_are_visible_whole_are_told_apart() -> None:
    blocks = flex_blocks.of_visibility(visibility.of_positions(512, 512, True, None, CPU), 1, 512).mask(512, 512)
    assert blocks.kv_num_blocks.flatten().tolist() == [1, 1, 1, 1]
    assert blocks.full_kv_num_blocks is not None
    assert blocks.full_kv_num_blocks.flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("shape", [(2, 1, 1, 300), (1, 3, 200, 300), (2, 3, 200, 300), (1, 1, 1, 256)])
@pytest.mark.parametrize("causal", [False, True])
def test_blocks_of_a_mask_broadcast_as_it_does(shape: tuple[int, ...], causal: bool) -> None:
    keep = drawn(*shape) > 0.3
    keep[..., 128:256] = True
    seen = visibility.of_positions(200, shape[3], True, None, CPU) if causal else None
    blocks = flex_blocks.of_mask(keep, seen, (2, 3, 200, shape[3]))
    want = keep.expand(2, 3, 200, shape[3])
    assert torch.equal(pairs(blocks, 2, 3, 200, shape[3]), want if seen is None else want & seen.mask)
    assert blocks.mask(200, shape[3]).kv_indices.shape[:2] == (2 if causal else shape[0], shape[1])


@pytest.mark.skipif(
    torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="this torch is built for CUDA and finds no driver, which even fake CUDA tensors ask for",
)
def test_blocks_are_made_without_a_host_read() -> None:
    with FakeTensorMode():
        device = torch.device("cuda", 0)
        cu, keep = (
            torch.empty(4, dtype=torch.int32, device=device),
            torch.empty(2, 300, dtype=torch.bool, device=device),
        )
        packed = Packed.from_cu_seqlens(cu, max_q=200).bind(device, (500, 2, 64), (500, 2, 64))
        padded = KeyPadding.from_mask(keep).bind(device, (2, 300, 2, 64), (2, 300, 2, 64))
        flex_blocks.of_visibility(visibility.of_packed(packed, 500, 500, True, None), 1, 500)
        flex_blocks.of_visibility(visibility.of_key_padding(padded, 300, 300, True, (3, 0)), 2, 300)
        blocks = flex_blocks.of_mask(keep.unsqueeze(1).unsqueeze(1), None, (2, 2, 300, 300))
    assert all(tensor.device == device for tensor in (*blocks.facts, *blocks.tables))
