"""Video tiles and block maps in plain torch: random layouts are the reference, memory is bounded, no number is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import polyattn as pa
from polyattn.backends import cpu, generic, listed

EDGES = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 7))
TILES = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
SLOTS = {"cpu": cpu.sdpa_video_tiles, "blocked": generic.blocked_video_tiles}
CALL: dict[str, Any] = {"causal": False, "window": None, "softcap": 0.0, "options": ()}


@pytest.mark.parametrize("slot", SLOTS)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    grid=EDGES, tile=TILES, prefix=st.lists(st.integers(1, 9), max_size=3), gap=st.integers(0, 3),
    after=st.integers(0, 3), past=st.integers(0, 3), sparsity=st.floats(0, 1), weighted=st.booleans(),
)  # fmt: skip
def test_random_layouts_are_the_reference(slot, grid, tile, prefix, gap, after, past, sparsity, weighted):
    start = sum(prefix) + gap
    layout = pa.VideoLayout(grid, tuple(prefix), start=start)
    if after or past:
        layout = pa.VideoLayout(grid, tuple(prefix), start=start, used=layout.tokens + after)
    structure = pa.VideoTiles(layout, tile, sparsity=sparsity, keep_sparse_numerics=True)
    rows = layout.rows + past
    generator = torch.Generator().manual_seed(rows)
    q, k, v, gate = (torch.randn(2, rows, heads, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    meta = structure.bind(q.device, q.shape, k.shape)
    meta = meta.with_gate(gate) if weighted else meta
    out, lse = SLOTS[slot](q, k, v, None, meta=meta, scale=0.5, need_lse=True, **CALL)
    want, want_lse = pa.reference_attention(q, k, v, structure=structure, scale=0.5, return_lse=True)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
    if weighted:
        want = pa.reference_attention(q, k, v, structure=structure, scale=0.5, gate=gate)
    torch.testing.assert_close(out, want, atol=1e-10, rtol=0)


@settings(max_examples=40, deadline=None)
@given(
    queries=st.integers(1, 40), keys=st.integers(1, 40), block_q=st.integers(1, 9), block_k=st.integers(1, 9),
    width=st.integers(0, 4), sized=st.booleans(),
)  # fmt: skip
def test_random_block_maps_are_the_reference(queries, keys, block_q, block_k, width, sized):
    generator = torch.Generator().manual_seed(queries * 41 + keys)
    rows, blocks = -(-queries // block_q), -(-keys // block_k)
    lists = torch.stack([torch.randperm(max(blocks, width), generator=generator)[:width] for _ in range(4 * rows)])
    lists = lists.reshape(1, 4, rows, width).clamp(max=blocks + 1).to(torch.int32)
    counts = torch.randint(0, min(width, blocks) + 1, (1, 4, rows), generator=generator)
    listed_ = torch.arange(width) < counts[..., None]
    lists = lists.where(listed_ & (lists < blocks), -1)
    counts = (lists >= 0).sum(-1)
    lists = lists.sort(dim=-1, descending=True).values
    sizes = torch.randint(0, block_k + 1, (blocks,), generator=generator) if sized else None
    structure = pa.BlockMap(lists, counts, block_q, block_k, sizes)
    q, k, v = (torch.randn(2, n, h, 4, generator=generator, dtype=torch.float64)
               for n, h in ((queries, 4), (keys, 2), (keys, 2)))  # fmt: skip
    for backend in ("sdpa", "blocked"):
        out, lse = pa.attention(q, k, v, structure=structure, return_lse=True, backend=backend)
        want, want_lse = pa.reference_attention(q, k, v, structure=structure, return_lse=True)
        torch.testing.assert_close(out, want, atol=1e-10, rtol=0)
        torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)


def test_a_block_that_a_device_tensor_names_but_no_key_has_keeps_nothing():
    q = torch.randn(1, 4, 1, 8)
    meta = pa.BlockMap([[[[0, 0]]]], [[[1]]], 4, 2).bind(q.device, q.shape, q.shape)
    beyond = torch.tensor([[[[7, 1]]]], dtype=torch.int32)
    wild = type(meta)(beyond, torch.tensor([[[2]]], dtype=torch.int32), None, 4, 2)
    out, _ = generic.blocked_block_map(q, q, q, None, meta=wild, scale=1.0, need_lse=False, **CALL)
    want = pa.reference_attention(q, q[:, 2:], q[:, 2:], scale=1.0)
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=0)


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that an operator makes, views apart."""

    entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(made, torch.Tensor) and made._base is None and not made.is_meta:
                self.entries = max(self.entries, made.untyped_storage().nbytes() // made.element_size())
        return result


def test_nothing_as_large_as_the_dense_scores_is_made():
    layout = pa.VideoLayout((8, 16, 16))
    structure = pa.VideoTiles(layout, (4, 4, 4), sparsity=0.9)
    q = torch.randn(1, layout.rows, 2, 16)
    for backend in ("sdpa", "blocked"):
        with Largest() as seen:
            pa.attention(q, q, q, structure=structure, backend=backend)
        assert seen.entries <= 2 * listed._STEP_ON_HOST
        assert seen.entries < 2 * layout.rows**2 / 4


@pytest.mark.parametrize("name", ["video_tiles", "block_map"])
def test_a_device_is_never_read(name):
    """On fake tensors of a device any read of a number raises."""
    layout = pa.VideoLayout((3, 4, 5), prefix=(7,), used=70)
    with FakeTensorMode():
        q = torch.empty(2, 72, 4, 64, dtype=torch.bfloat16, device="cuda")
        k = torch.empty(2, 72, 2, 64, dtype=torch.bfloat16, device="cuda")
        tensors = {"dtype": torch.int32, "device": "cuda"}
        structure: Any = {
            "video_tiles": lambda: pa.VideoTiles(layout, (2, 2, 2), topk=3),
            "block_map": lambda: pa.BlockMap(torch.ones(1, 1, 5, 3, **tensors), torch.ones(1, 1, 5, **tensors), 16, 16),
        }[name]()
        meta = structure.bind(q.device, q.shape, k.shape)
        slot = getattr(generic, f"blocked_{name}")
        out, lse = slot(q, k, k, None, meta=meta, scale=0.125, need_lse=True, **CALL)
    assert (out.shape, out.dtype, out.device.type, lse.shape) == (q.shape, q.dtype, "cuda", (2, 4, 72))
