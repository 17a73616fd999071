"""Rows gathered from padded batches and scattered back: against indexing, bit for bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from polyattn.kernels import row_tiles
from polyattn.kernels import rows as moving
from polyattn.kernels.rows import blank, clear, pack, unpack
from tests.kernels.row_layouts import LAYOUTS, NARROW, every_second, laid_out, random

B, S = 2, 37
#: Positions of 74 kept: the first and the last row, holes, a run over the sample's end.
INDEX = [0, 1, 5, 9, 35, 36, 37, 38, 55, 73]
#: (heads, head dim): wide, no power of two, narrower than a vector, one element.
WIDTHS = [(3, 16), (5, 24), (17, 8), (3, 5), (1, 1), (2, 128)]


def _packed(tensor: torch.Tensor, index: list[int]) -> torch.Tensor:
    """Row by row; a position that is none of the tensor's gives zeros."""
    rows = tensor.flatten(0, 1)
    inside = [rows[i] if 0 <= i < rows.shape[0] else torch.zeros_like(rows[0]) for i in index]
    return torch.stack(inside) if inside else rows[:0]


@pytest.mark.parametrize(("heads", "dim"), WIDTHS)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_pack_takes_rows(
    heads: int, dim: int, index_dtype: torch.dtype, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    index = torch.tensor(INDEX, dtype=index_dtype, device=device)
    for dtype in dtypes:
        tensor = random(device, dtype, B, S, heads, dim)
        assert torch.equal(pack((tensor,), index)[0], _packed(tensor, INDEX)), dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pack_takes_any_strides_and_each_tensor_its_own_heads_and_dim(layout: str, device: str) -> None:
    q = laid_out(random(device, torch.float16, B, S, 6, 24), layout)
    k = laid_out(random(device, torch.float16, B, S, 2, 24), layout)
    v = laid_out(random(device, torch.float16, B, S, 2, 40), layout)
    before = [tensor.clone() for tensor in (q, k, v)]
    packed = pack((q, k, v), torch.tensor(INDEX, device=device))
    for rows, tensor, held in zip(packed, (q, k, v), before, strict=True):
        assert rows.is_contiguous()
        assert torch.equal(rows, _packed(tensor, INDEX))
        assert torch.equal(tensor, held)


def test_pack_of_mixed_layouts_in_one_launch(device: str) -> None:
    tensors = tuple(
        laid_out(random(device, torch.float32, B, S, 2, 16), layout) for layout in ("heads first", "fused", "sliced")
    )
    for rows, tensor in zip(pack(tensors, torch.tensor(INDEX, device=device)), tensors, strict=True):
        assert torch.equal(rows, _packed(tensor, INDEX))


def test_pack_of_a_broadcast_batch(device: str) -> None:
    tensor = random(device, torch.float32, 1, S, 2, 16).expand(3, S, 2, 16)
    index = [0, 36, 37, 80, 110]
    assert torch.equal(pack((tensor,), torch.tensor(index, device=device))[0], _packed(tensor, index))


def test_positions_outside_of_the_tensor_pack_to_zeros(device: str) -> None:
    index = [3, B * S, 7, 1 << 40, -1, B * S - 1]
    tensor = random(device, torch.float32, B, S, 3, 8)
    assert torch.equal(pack((tensor,), torch.tensor(index, device=device))[0], _packed(tensor, index))


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=["no batch", "no rows"])
def test_pack_of_a_tensor_without_rows(shape: tuple[int, int], device: str) -> None:
    empty = torch.empty(*shape, 2, 8, device=device)
    assert torch.equal(pack((empty,), torch.tensor([0, 1], device=device))[0], torch.zeros(2, 2, 8, device=device))


def test_pack_of_no_positions(device: str) -> None:
    q, k = random(device, torch.float32, B, S, 4, 8), random(device, torch.float32, B, S, 2, 8)
    packed = pack((q, k), torch.empty(0, dtype=torch.int64, device=device))
    assert [tuple(rows.shape) for rows in packed] == [(0, 4, 8), (0, 2, 8)]


def test_pack_takes_at_most_three(device: str) -> None:
    tensor = random(device, torch.float32, 1, 4, 1, 8)
    with pytest.raises(ValueError, match="one to three"):
        pack((tensor,) * 4, torch.tensor([0], device=device))


def _spread(rows: torch.Tensor, index: list[int], batch: int, length: int, blank: float) -> torch.Tensor:
    """rows [n,...] -> [B*S,...], position by position."""
    whole = rows.new_full((batch * length, *rows.shape[1:]), blank)
    for row, position in zip(rows, index, strict=True):
        if 0 <= position < batch * length:
            whole[position] = row
    return whole.unflatten(0, (batch, length))


def _expected(rows: torch.Tensor, lse: torch.Tensor, index: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    spread = _spread(lse.transpose(0, 1), index, B, S, -math.inf)
    return _spread(rows, index, B, S, 0.0), spread.transpose(1, 2)


@pytest.mark.parametrize(("heads", "dim"), WIDTHS)
def test_unpack_puts_rows_back_and_blanks_the_others(
    heads: int, dim: int, device: str, dtypes: tuple[torch.dtype, ...]
) -> None:
    lse = random(device, torch.float32, heads, len(INDEX))
    for dtype in dtypes:
        rows = random(device, dtype, len(INDEX), heads, dim)
        out, spread = unpack(rows, lse, torch.tensor(INDEX, device=device), None, B, S)
        expected, expected_lse = _expected(rows, lse, INDEX)
        assert torch.equal(out, expected), dtype
        assert torch.equal(spread, expected_lse), dtype


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unpack_writes_every_element_of_a_given_buffer_and_nothing_else(layout: str, device: str) -> None:
    rows = random(device, torch.float16, len(INDEX), 3, 16)
    out = laid_out(torch.full((B, S, 3, 16), math.nan, dtype=torch.float16, device=device), layout)
    around = out._base if out._base is not None else out
    gaps = around.numel() - out.numel()
    result, lse = unpack(rows, None, torch.tensor(INDEX, device=device), out, B, S)
    assert result is out
    assert lse is None
    assert torch.equal(out, _spread(rows, INDEX, B, S, 0.0))
    assert int(around.isnan().sum()) == gaps


def test_unpack_of_strided_rows_and_lse(device: str) -> None:
    rows = random(device, torch.float32, 3, len(INDEX), 16).transpose(0, 1)
    lse = random(device, torch.float32, len(INDEX), 3).transpose(0, 1)
    out, spread = unpack(rows, lse, torch.tensor(INDEX, device=device), None, B, S)
    expected, expected_lse = _expected(rows, lse, INDEX)
    assert torch.equal(out, expected)
    assert torch.equal(spread, expected_lse)


def test_rows_whose_position_is_outside_are_dropped(device: str) -> None:
    index = [3, B * S, 7, 1 << 40, -1, B * S - 1]
    rows, lse = random(device, torch.float32, 6, 3, 8), random(device, torch.float32, 3, 6)
    out, spread = unpack(rows, lse, torch.tensor(index, device=device), None, B, S)
    expected, expected_lse = _expected(rows, lse, index)
    assert torch.equal(out, expected)
    assert torch.equal(spread, expected_lse)


def test_unpack_of_no_rows_is_all_padding(device: str) -> None:
    rows, lse = torch.empty(0, 3, 8, device=device), torch.empty(3, 0, device=device)
    out, spread = unpack(rows, lse, torch.empty(0, dtype=torch.int64, device=device), None, B, S)
    assert torch.equal(out, torch.zeros(B, S, 3, 8, device=device))
    assert torch.equal(spread, torch.full((B, 3, S), -math.inf, device=device))


def test_unpack_into_no_rows(device: str) -> None:
    rows, lse = torch.empty(0, 3, 8, device=device), torch.empty(3, 0, device=device)
    out, spread = unpack(rows, lse, torch.empty(0, dtype=torch.int64, device=device), None, 2, 0)
    assert tuple(out.shape) == (2, 0, 3, 8)
    assert spread is not None
    assert tuple(spread.shape) == (2, 3, 0)


@pytest.mark.parametrize(("heads", "dim"), NARROW)
def test_narrow_rows_with_steps_are_packed_and_put_back(heads: int, dim: int, device: str) -> None:
    tensor, _ = every_second(random(device, torch.float32, B, S, heads, dim))
    index = torch.tensor(INDEX, device=device)
    (rows,) = pack((tensor,), index)
    assert torch.equal(rows, _packed(tensor, INDEX))
    out, memory = every_second(torch.full((B, S, heads, dim), 7.0, device=device))
    unpack(rows, None, index, out, B, S)
    assert torch.equal(out, _spread(rows, INDEX, B, S, 0.0))
    assert bool(memory[..., 1::2].isnan().all())


def test_an_index_with_steps_is_read_where_it_lies(device: str) -> None:
    index = torch.tensor([[position, 2] for position in INDEX], device=device)[:, 0]
    tensor = random(device, torch.float32, B, S, 3, 8)
    (rows,) = pack((tensor,), index)
    assert torch.equal(rows, _packed(tensor, INDEX))
    assert torch.equal(unpack(rows, None, index, None, B, S)[0], _spread(rows, INDEX, B, S, 0.0))


@pytest.mark.parametrize("what", ["clear", "blank", "pack", "unpack"])
def test_grids_of_many_short_rows_can_be_launched(what: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third axis of a grid end at 65535."""
    batch = 70000
    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(moving, "launch_prepared", lambda prepared, grid, *others: grids.append(grid))
    out, index = torch.empty(batch, 4, 1, 16, device=device), torch.arange(2 * batch, device=device)
    calls: dict[str, Any] = {
        "clear": lambda: clear(out, None, torch.full((batch,), 2, dtype=torch.int32, device=device)),
        "blank": lambda: blank(out, None, torch.ones(batch, 4, dtype=torch.bool, device=device)),
        "pack": lambda: pack((out,), index),
        "unpack": lambda: unpack(out.flatten(0, 1)[: 2 * batch], None, index, None, batch, 4),
    }
    calls[what]()
    (grid,) = grids
    assert grid[0] < 1 << 31
    assert all(0 < programs <= 65535 for programs in grid[1:])


def test_the_gradient_of_pack_goes_back_to_the_rows(device: str) -> None:
    index = torch.tensor([*INDEX[:-1], B * S + 1], device=device)
    q = random(device, torch.float32, B, S, 4, 8).requires_grad_()
    k = random(device, torch.float32, B, S, 2, 8)
    v = laid_out(random(device, torch.float32, B, S, 2, 16), "heads first").requires_grad_()
    rows = pack((q, k, v), index)
    grads = tuple(random(device, torch.float32, *part.shape) for part in rows)
    got = torch.autograd.grad((rows[0], rows[2]), (q, v), (grads[0], grads[2]))
    assert not rows[1].requires_grad
    for found, grad in zip(got, (grads[0], grads[2]), strict=True):
        assert torch.equal(found, _spread(grad, index.tolist(), B, S, 0.0))


def test_the_gradient_of_unpack_is_gathered(device: str) -> None:
    index = torch.tensor([*INDEX[:-1], B * S + 1], device=device)
    rows = random(device, torch.float32, len(INDEX), 3, 8).requires_grad_()
    lse = random(device, torch.float32, 3, len(INDEX)).requires_grad_()
    out, spread = unpack(rows, lse, index, None, B, S)
    grad, grad_lse = random(device, torch.float32, B, S, 3, 8), random(device, torch.float32, B, 3, S)
    got, got_lse = torch.autograd.grad((out, spread), (rows, lse), (grad, grad_lse))
    assert torch.equal(got, _packed(grad, index.tolist()))
    assert torch.equal(got_lse, _packed(grad_lse.transpose(1, 2), index.tolist()).transpose(0, 1))


def test_pack_and_unpack_are_differentiable_twice(device: str) -> None:
    index = torch.tensor(INDEX, device=device)
    q = random(device, torch.float32, B, S, 2, 8).requires_grad_()

    def total(q: torch.Tensor) -> torch.Tensor:
        rows = pack((q,), index)[0]
        return (unpack(rows * rows * rows, None, index, None, B, S)[0]).sum()

    (first,) = torch.autograd.grad(total(q), q, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), q)
    kept = _spread(_packed(torch.ones_like(q), INDEX), INDEX, B, S, 0.0)
    assert torch.allclose(first, 3 * q * q * kept)
    assert torch.allclose(second, 6 * q * kept)


def test_inference_mode(device: str) -> None:
    with torch.inference_mode():
        index = torch.tensor(INDEX, device=device)
        tensor = random(device, torch.float32, B, S, 3, 8)
        rows = pack((tensor,), index)[0]
        out, _ = unpack(rows, None, index, None, B, S)
    assert torch.equal(out, _spread(_packed(tensor, INDEX), INDEX, B, S, 0.0))


@pytest.mark.parametrize(
    ("width", "columns"), [(24 * 128, 1024), (40 * 128, 1024), (17 * 80, 128), (2 * 64, 128), (48, 64), (1, 1)]
)
def test_few_lanes_of_a_row_are_idle(width: int, columns: int) -> None:
    cut = row_tiles.cut(width, 2)
    assert cut.columns == columns
    assert width <= cut.columns * cut.chunks
    assert width <= 64 or cut.columns * cut.chunks <= 1.05 * width
