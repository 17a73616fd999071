"""Writing rows into pages: the rows given land in their slots, bit for bit, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import polyattn as pa
from polyattn import plan
from polyattn.kernels.pages import write_rows

#: pages, page size, KV heads, head dim, value head dim, rows
SHAPES = {
    "page 4": (5, 4, 2, 8, 8, 7),
    "page 1": (9, 1, 3, 16, 40, 6),
    "page 33": (3, 33, 1, 80, 24, 60),
    "page 64, wide rows": (2, 64, 17, 80, 72, 100),
}
#: Beside slots of the pool: what skips a row.
OUTSIDE = (-1, -(2**62), 2**40)


def rows_and_pools(name: str, dtype: torch.dtype, device: str, layout: str) -> tuple[torch.Tensor, ...]:
    """k_pool, v_pool, k, v of random content. layout: "dense", or "strided" in every tensor."""
    pages, page_size, heads, dim, v_dim, rows = SHAPES[name]
    if layout == "dense":
        shapes = [
            (pages, page_size, heads, dim),
            (pages, page_size, heads, v_dim),
            (rows, heads, dim),
            (rows, heads, v_dim),
        ]
        return tuple(torch.randn(shape).to(device, dtype) for shape in shapes)
    tensors = (
        torch.randn(pages, 2, page_size, heads, dim),
        torch.randn(pages, heads, page_size, v_dim),
        torch.randn(rows, dim, heads),
        torch.randn(rows, 3, heads, v_dim),
    )
    k_pool, v_pool, k, v = (tensor.to(device, dtype) for tensor in tensors)
    return k_pool[:, 1], v_pool.transpose(1, 2), k.transpose(1, 2), v[:, 1]


def chosen_slots(name: str, dtype: torch.dtype) -> torch.Tensor:
    """Different slots in no order, every third outside of the pool."""
    pages, page_size, *_, rows = SHAPES[name]
    slots = torch.randperm(pages * page_size)[:rows]
    narrow = dtype == torch.int32
    outside = [-(2**31) if narrow and place < -1 else 2**31 - 1 if narrow and place > 0 else place for place in OUTSIDE]
    outside.append(pages * page_size)
    slots[::3] = torch.tensor(outside)[torch.arange(len(slots[::3])) % len(outside)]
    return slots.to(dtype)


def written(pool: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """What a pool should hold, one row at a time."""
    result = pool.clone()
    for row, slot in zip(rows, slots.tolist(), strict=True):
        if 0 <= slot < pool.shape[0] * pool.shape[1]:
            result[slot // pool.shape[1], slot % pool.shape[1]] = row
    return result


@pytest.mark.parametrize("layout", ["dense", "strided"])
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_land_in_their_slots(name: str, slot_dtype: torch.dtype, layout: str, device: str) -> None:
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        k_pool, v_pool, k, v = rows_and_pools(name, dtype, device, layout)
        slots = chosen_slots(name, slot_dtype)
        expected = written(k_pool, k, slots), written(v_pool, v, slots)
        write_rows(k_pool, v_pool, k, v, slots.to(device))
        assert torch.equal(k_pool, expected[0])
        assert torch.equal(v_pool, expected[1])


def test_slots_of_any_stride_and_alignment(device: str) -> None:
    torch.manual_seed(0)
    k_pool, v_pool, k, v = rows_and_pools("page 4", torch.float32, device, "dense")
    slots = chosen_slots("page 4", torch.int64)
    spread = slots.new_full((2 * len(slots) + 1,), 3)
    spread[1::2] = slots
    expected = written(k_pool, k, slots)
    write_rows(k_pool, v_pool, k, v, spread.to(device)[1::2])
    assert torch.equal(k_pool, expected)


def test_no_rows_are_no_launch(device: str) -> None:
    k_pool, v_pool, k, v = rows_and_pools("page 4", torch.float32, device, "dense")
    before = k_pool.clone()
    write_rows(k_pool, v_pool, k[:0], v[:0], torch.empty(0, dtype=torch.int64, device=device))
    assert torch.equal(k_pool, before)


@pytest.mark.parametrize(
    "slots", [[4, 1, -1, 0], torch.tensor([4, 1, -1, 0], dtype=torch.int16)], ids=["list", "int16"]
)
def test_a_cache_writes_by_its_platforms_function(
    slots: list[int] | torch.Tensor, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = pa.PagedKVCache(3, 2, 2, 8, torch.float32, device, v_head_dim=5)
    k, v = torch.randn(4, 2, 8, device=device), torch.randn(4, 2, 5, device=device)
    calls = []
    kind = cache.k.device.type
    platform = replace(plan.owner_of(kind), cache_write="polyattn.kernels.pages:write_rows")
    monkeypatch.setitem(plan._owners, kind, platform)
    monkeypatch.setitem(plan._calls, platform.cache_write, lambda *given: calls.append(given) or write_rows(*given))
    cache.write(k, v, slots)
    assert len(calls) == 1
    assert torch.equal(cache.k.flatten(0, 1)[[4, 1, 0]], k[[0, 1, 3]])
    assert torch.equal(cache.v.flatten(0, 1)[[4, 1, 0]], v[[0, 1, 3]])
    assert cache.k.flatten(0, 1)[[2, 3, 5]].eq(0).all()


def test_what_autograd_saved_of_a_pool_is_stale_after_a_write(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = pa.PagedKVCache(3, 2, 2, 8, torch.float32, device)
    kind = cache.k.device.type
    platform = replace(plan.owner_of(kind), cache_write="polyattn.kernels.pages:write_rows")
    monkeypatch.setitem(plan._owners, kind, platform)
    weight = torch.ones(8, device=device, requires_grad=True)
    loss = (cache.k * weight).sum()
    cache.write(torch.ones(1, 2, 8, device=device), torch.ones(1, 2, 8, device=device), [0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
