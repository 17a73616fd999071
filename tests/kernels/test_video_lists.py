"""Block maps by the kernel of listed blocks: empty rows, sizes, ragged ends, entries that name nothing, strides."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import polyattn as pa
from polyattn.backends.triton_video import block_map
from polyattn.kernels.video_fine import Blocks, Listed, in_order, listed_attention
from polyattn.kernels.video_tiles import VideoTile

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def _random(device: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


def _by_slot(q: Any, k: Any, v: Any, structure: pa.BlockMap, scale: float = 0.3) -> Any:
    meta = structure.bind(q.device, q.shape, k.shape)
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype, device=q.device)
    rules: dict[str, Any] = {"causal": False, "window": None, "softcap": 0.0, "options": ()}
    return block_map(q, k, v, out, meta=meta, scale=scale, need_lse=True, **rules)


def _agree(got: Any, q: Any, k: Any, v: Any, structure: pa.BlockMap, scale: float = 0.3) -> None:
    exact = [tensor.cpu().double() for tensor in (q, k, v)]
    want, lse = pa.reference_attention(*exact, structure=structure, scale=scale, return_lse=True)
    tolerance = TOLERANCES[q.dtype]
    torch.testing.assert_close(got[0].cpu().double(), want, atol=tolerance, rtol=0)
    torch.testing.assert_close(got[1].cpu().double(), lse, atol=max(tolerance, 1e-4), rtol=0)


def _map(queries: int, keys: int, block_q: int, block_k: int, *, batch: int = 1, heads: int = 1, **rest: Any) -> Any:
    """Random lists of every length, empty ones too."""
    rows, columns = -(-queries // block_q), -(-keys // block_k)
    generator = torch.Generator().manual_seed(queries + keys)
    lists = torch.rand(batch, heads, rows, columns, generator=generator).argsort(dim=-1)
    counts = torch.randint(0, columns + 1, (batch, heads, rows), generator=generator)
    counts[0, 0, 0] = 0
    return pa.BlockMap(lists, counts, block_q, block_k, **rest)


#: Sq, Sk, block_q, block_k, what else.
CASES: dict[str, tuple[int, int, int, int, dict[str, Any]]] = {
    "even": (64, 64, 16, 16, {}),
    "ragged": (50, 75, 16, 32, {}),
    "larger blocks than tiles": (90, 130, 70, 100, {}),
    "small blocks": (21, 30, 3, 5, {}),
    "blocks that end early": (40, 64, 16, 16, {"sizes": [16, 0, 3, 9]}),
    "a map for each head and sample": (33, 40, 16, 16, {"batch": 2, "heads": 4}),
    "a map for each sample": (33, 40, 16, 16, {"batch": 2}),
    "one block": (5, 7, 64, 64, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_reference(device: str, dtypes: tuple[torch.dtype, ...], case: str) -> None:
    queries, keys, block_q, block_k, rest = CASES[case]
    structure = _map(queries, keys, block_q, block_k, **rest)
    for dtype in dtypes:
        q, k, v = (
            _random(device, dtype, 2, rows, heads, size)
            for rows, heads, size in ((queries, 4, 24), (keys, 2, 24), (keys, 2, 16))
        )
        _agree(_by_slot(q, k, v, structure), q, k, v, structure)


def test_blocks_that_no_list_names_may_hold_anything(device: str) -> None:
    lists, counts = torch.tensor([[[[0, 2, 1], [2, 1, 1]]]]), torch.tensor([[[2, 1]]])
    structure = pa.BlockMap(lists, counts, 16, 16)
    q, k, v = (_random(device, torch.float32, 1, rows, 1, 16) for rows in (32, 60, 60))
    want = _by_slot(q, k, v, structure)
    for tensor in (k, v):
        tensor[:, 16:32] = math.nan
        tensor[:, 48:] = math.nan
    got = _by_slot(q, k, v, structure)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_an_entry_that_names_no_block_is_hidden(device: str) -> None:
    """Lists that only the device knows are not checked."""
    q, k, v = (_random(device, torch.float32, 1, 32, 1, 16) for _ in range(3))
    starts = torch.tensor([0, 16], dtype=torch.int32, device=device)
    blocks = Blocks(starts, starts + 16, 16)
    lists = torch.tensor([[[[0, -1, 2, 1 << 30], [-(1 << 31), 7, 1, 0]]]], dtype=torch.int32, device=device)
    counts = torch.tensor([[[4, 99]]], dtype=torch.int32, device=device)
    out, lse = torch.full_like(q, math.nan), q.new_empty(1, 1, 32)
    tile = VideoTile(16, 16, 4, 2)
    listed_attention(q, k, v, out, lse, blocks, blocks, Listed(lists, counts, 32), tile, scale=0.3)
    plain = pa.BlockMap([[[[0, 0], [1, 0]]]], [[[1, 2]]], 16, 16)
    _agree((out, lse), q, k, v, plain)


def test_no_keys_and_no_queries(device: str) -> None:
    q, k = _random(device, torch.float32, 1, 20, 2, 16), torch.empty(1, 0, 2, 16, device=device)
    nothing = pa.BlockMap(torch.zeros(1, 1, 2, 0, dtype=torch.int32), torch.zeros(1, 1, 2, dtype=torch.int32), 16, 16)
    out, lse = _by_slot(q, k, k, nothing)
    assert not out.any()
    assert bool((lse == -math.inf).all())
    empty = pa.BlockMap(torch.zeros(1, 1, 0, 1, dtype=torch.int32), torch.zeros(1, 1, 0, dtype=torch.int32), 16, 16)
    out, lse = _by_slot(k, q, q, empty)
    assert out.shape == (1, 0, 2, 16)
    assert lse.shape == (1, 2, 0)


def test_rows_in_order(device: str) -> None:
    k, v = _random(device, torch.float16, 2, 90, 3, 24), _random(device, torch.float16, 2, 90, 3, 16)
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0)).to(device, torch.int32)
    for lines in (83, 115, 200):
        for moved, rows in zip(in_order(k, v, order, 83, lines), (k, v), strict=True):
            assert torch.equal(moved[:, :, :83], rows[:, order[:83].long()].transpose(1, 2))
            assert moved.shape[2] == lines
            assert not moved[:, :, 83:].any()
