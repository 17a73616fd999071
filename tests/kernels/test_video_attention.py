"""Video tiles by the portable kernels against the reference: grids that do not divide, prefixes, gates, variants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import polyattn as pa
from polyattn.backends.triton_video import video_tiles
from polyattn.kernels.video_attention import Tiling, video_attention
from polyattn.kernels.video_tiles import VideoTile

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

#: Every way in which the fine kernel loads keys and cuts rows.
VARIANTS = {
    "gathered": VideoTile(16, 16, 4, 2),
    "packed": VideoTile(16, 16, 4, 2, packed=True),
    "described": VideoTile(16, 16, 4, 2, packed=True, described="kv"),
    "described keys": VideoTile(16, 16, 4, 2, packed=True, described="k"),
    "paired": VideoTile(16, 16, 4, 2, paired=True),
}


def _random(device: str, dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(device, dtype)


def _inputs(
    device: str, dtype: torch.dtype, rows: int, *, batch: int = 1, heads: int = 2, kv_heads: int = 2, dim: int = 16,
    v_dim: int | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, v_dim or dim), (heads, v_dim or dim))
    return tuple(_random(device, dtype, batch, rows, *shape, seed=place) for place, shape in enumerate(shapes))


def _by_slot(q: Any, k: Any, v: Any, structure: pa.VideoTiles, gate: Any, scale: float, need_lse: bool = True) -> Any:
    meta = structure.bind(q.device, q.shape, k.shape)
    if gate is not None:
        meta = meta.with_gate(gate)
    out = torch.full((*q.shape[:-1], v.shape[-1]), math.nan, dtype=q.dtype, device=q.device)
    rules: dict[str, Any] = {"causal": False, "window": None, "softcap": 0.0, "options": ()}
    got = video_tiles(q, k, v, out, meta=meta, scale=scale, need_lse=need_lse, **rules)
    assert got[0] is out
    return got


def _agree(got: Any, q: Any, k: Any, v: Any, structure: pa.VideoTiles, gate: Any, scale: float) -> None:
    exact = [tensor.cpu().double() for tensor in (q, k, v)]
    weight = None if gate is None else gate.cpu().double()
    want = pa.reference_attention(*exact, structure=structure, scale=scale, gate=weight)
    _, lse = pa.reference_attention(*exact, structure=structure, scale=scale, return_lse=True)
    tolerance = TOLERANCES[q.dtype]
    torch.testing.assert_close(got[0].cpu().double(), want, atol=tolerance, rtol=0)
    if got[1] is not None:
        assert got[1].dtype == torch.float32
        torch.testing.assert_close(got[1].cpu().double(), lse, atol=max(tolerance, 1e-4), rtol=0)


#: Layout, tile, kept, sizes of the tensors, whether there is a gate.
CASES: dict[str, tuple[pa.VideoLayout, tuple[int, int, int], int, dict[str, int], bool]] = {
    "whole tiles": (pa.VideoLayout((4, 4, 4)), (2, 2, 4), 2, {}, False),
    "one-frame tail": (pa.VideoLayout((5, 3, 5)), (2, 2, 4), 3, {}, True),
    "prefix segments": (pa.VideoLayout((3, 4, 4), prefix=(7, 18)), (2, 4, 2), 1, {}, True),
    "padding": (pa.VideoLayout((2, 3, 6), prefix=(3,), used=41), (2, 2, 4), 2, {}, True),
    "samples": (pa.VideoLayout((2, 5, 4)), (1, 4, 4), 2, {"batch": 2}, True),
    "shared heads": (pa.VideoLayout((2, 5, 4)), (2, 4, 2), 2, {"heads": 4, "kv_heads": 2, "v_dim": 24}, True),
    "odd head dims": (pa.VideoLayout((2, 5, 4)), (2, 4, 2), 2, {"dim": 20, "v_dim": 9}, True),
    "all kept": (pa.VideoLayout((3, 3, 4), prefix=(5,)), (2, 2, 4), 9, {}, True),
    "one tile": (pa.VideoLayout((2, 3, 3)), (4, 4, 4), 1, {}, True),
    "large tiles": (pa.VideoLayout((3, 6, 6)), (3, 5, 4), 2, {}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_reference(device: str, dtypes: tuple[torch.dtype, ...], case: str) -> None:
    layout, tile, kept, sizes, gated = CASES[case]
    structure = pa.VideoTiles(layout, tile, topk=kept)
    rows = layout.rows + (4 if layout.used else 0)
    for dtype in dtypes:
        q, k, v, gate = _inputs(device, dtype, rows, **sizes)
        got = _by_slot(q, k, v, structure, gate if gated else None, 0.3)
        _agree(got, q, k, v, structure, gate if gated else None, 0.3)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_gives_the_same(device: str, variant: str) -> None:
    structure = pa.VideoTiles(pa.VideoLayout((3, 3, 5), prefix=(19,)), (2, 3, 4), topk=2)
    q, k, v, gate = _inputs(device, torch.float16, structure.layout.rows, heads=2, kv_heads=2)
    meta = structure.bind(q.device, q.shape, k.shape)
    tiling = Tiling(meta.order, meta.starts, meta.prefix_blocks, meta.kept, max(meta.sizes), meta.used)
    got = video_attention(
        q, k, v, None, tiling, scale=0.3, gate=gate, need_lse=True, tile=VARIANTS[variant], heads_at_once=1
    )
    _agree(got, q, k, v, structure, gate, 0.3)


@pytest.mark.parametrize("scale", [-0.4, 0.0, 30.0, 1e30])
def test_scales(device: str, scale: float) -> None:
    """Scores of one sign decide what is kept; with 0 all are equal, and the first are kept."""
    structure = pa.VideoTiles(pa.VideoLayout((2, 4, 6)), (2, 2, 2), topk=2)
    q, k, v, gate = _inputs(device, torch.float32, structure.layout.rows)
    got = _by_slot(q, k, v, structure, gate, scale, need_lse=False)
    assert got[1] is None
    if scale < 1e30:
        _agree(got, q, k, v, structure, gate, scale)
    else:
        assert bool(torch.isfinite(got[0]).all())


def test_strided_inputs_are_read_as_they_are(device: str) -> None:
    structure = pa.VideoTiles(pa.VideoLayout((2, 3, 6)), (2, 2, 4), topk=1)
    q, k, v, gate = (
        x.transpose(1, 2).contiguous().transpose(1, 2)[:, :, :, ::2]
        for x in _inputs(device, torch.float32, structure.layout.rows, dim=32)
    )
    _agree(_by_slot(q, k, v, structure, gate, 0.3), q, k, v, structure, gate, 0.3)


def test_rows_past_the_tokens_may_hold_anything(device: str) -> None:
    structure = pa.VideoTiles(pa.VideoLayout((2, 3, 6), used=36), (2, 2, 4), topk=2)
    q, k, v, gate = _inputs(device, torch.float32, 45)
    want = _by_slot(q, k, v, structure, gate, 0.3)
    for tensor in (q, k, v, gate):
        tensor[:, 36:] = math.nan
    got = _by_slot(q, k, v, structure, gate, 0.3)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])
    assert not got[0][:, 36:].any()
    assert bool((got[1][:, :, 36:] == -math.inf).all())


def test_it_is_the_same_with_heads_taken_one_at_a_time(device: str) -> None:
    structure = pa.VideoTiles(pa.VideoLayout((2, 2, 5)), (2, 2, 3), topk=1)
    q, k, v, gate = _inputs(device, torch.float16, structure.layout.rows, heads=6, kv_heads=3)
    meta = structure.bind(q.device, q.shape, k.shape)
    tiling = Tiling(meta.order, meta.starts, meta.prefix_blocks, meta.kept, max(meta.sizes), meta.used)
    one, two, all_heads = (
        video_attention(q, k, v, None, tiling, scale=0.3, gate=gate, heads_at_once=size)[0] for size in (1, 2, 3)
    )
    assert torch.equal(one, all_heads)
    assert torch.equal(two, all_heads)


@pytest.mark.parametrize("seed", range(8))
def test_random_small_grids(device: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    grid = (number(1, 4), number(1, 4), number(1, 5))
    tile = (number(1, 3), number(1, 4), number(1, 4))
    prefix = tuple(number(1, 20) for _ in range(number(0, 2)))
    structure = pa.VideoTiles(pa.VideoLayout(grid, prefix=prefix), tile, sparsity=number(0, 10) / 10)
    q, k, v, gate = _inputs(device, torch.float32, structure.layout.rows, heads=2, kv_heads=number(1, 2))
    weight = gate if number(0, 1) else None
    _agree(_by_slot(q, k, v, structure, weight, 0.5), q, k, v, structure, weight, 0.5)


def test_nothing_is_read_on_the_host() -> None:
    """Fake tensors of a device hold no data, so that any look at it would raise."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 50, heads, 32, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        structure = pa.VideoTiles(pa.VideoLayout((2, 4, 5), prefix=(7,), used=47), (2, 2, 4), topk=2)
        meta = structure.bind(q.device, q.shape, k.shape).with_gate(torch.empty_like(q))
        rules: dict[str, Any] = {"causal": False, "window": None, "softcap": 0.0, "options": ()}
        out, lse = video_tiles(q, k, v, None, meta=meta, scale=0.3, need_lse=True, **rules)
        assert lse is not None
        assert (out.shape, lse.shape) == (q.shape, (2, 4, 50))
        assert out.device.type == lse.device.type == "cuda"
