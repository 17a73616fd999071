"""Padding cleared behind an end and blanked by a mask: what is kept and what lies between stay as they are."""

from __future__ import annotations

import math

import pytest
import torch

from polyattn.kernels import row_tiles
from polyattn.kernels import rows as moving
from polyattn.kernels.rows import blank, clear
from tests.kernels.row_layouts import LAYOUTS, NARROW, every_second, laid_out, random

B, S = 2, 37


@pytest.mark.parametrize("lse_layout", ["contiguous", "rows first", None])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "used", [(37, 37), (36, 0), (0, 5), (40, -2)], ids=["nothing", "one and all", "most", "out of range"]
)
def test_clear_blanks_what_lies_behind_and_nothing_else(
    used: tuple[int, int], layout: str, lse_layout: str | None, device: str
) -> None:
    out = laid_out(random(device, torch.float16, B, S, 3, 16), layout)
    lse = None if lse_layout is None else random(device, torch.float32, B, 3, S)
    if lse is not None and lse_layout == "rows first":
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    around = (out._base if out._base is not None else out).clone()
    behind = torch.arange(S, device=device)[None, :] >= torch.tensor(used, device=device)[:, None]
    expected = out.masked_fill(behind[:, :, None, None], 0.0)
    expected_lse = None if lse is None else lse.masked_fill(behind[:, None, :], -math.inf)
    clear(out, lse, torch.tensor(used, dtype=torch.int32, device=device))
    assert torch.equal(out, expected)
    assert lse is None or torch.equal(lse, expected_lse)
    held = out._base if out._base is not None else out
    assert torch.equal(held.isnan(), around.isnan())  # the gaps between rows


@pytest.mark.parametrize("lse_layout", [None, "contiguous", "rows first"])
@pytest.mark.parametrize("layout", ["contiguous", "heads first", "sliced", "dims apart"])
def test_blank_takes_the_rows_that_are_not_kept_and_no_other(layout: str, lse_layout: str | None, device: str) -> None:
    out = laid_out(random(device, torch.float16, B, S, 3, 16), layout)
    lse = None if lse_layout is None else random(device, torch.float32, B, 3, S)
    if lse is not None and lse_layout == "rows first":
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    keep = torch.rand(B, S, device=device) > 0.1
    keep[0] = True
    keep[1, -1] = False
    expected = out.masked_fill(keep.logical_not()[:, :, None, None], 0.0)
    expected_lse = None if lse is None else lse.masked_fill(keep.logical_not()[:, None, :], -math.inf)
    blank(out, lse, keep)
    assert torch.equal(out, expected)
    assert lse is None or torch.equal(lse, expected_lse)


@pytest.mark.parametrize(("heads", "dim"), NARROW)
@pytest.mark.parametrize("what", ["clear", "blank"])
def test_padding_of_narrow_rows_with_steps_is_blanked_and_nothing_between(
    what: str, heads: int, dim: int, device: str
) -> None:
    out, memory = every_second(random(device, torch.float32, B, S, heads, dim))
    keep = torch.arange(S, device=device)[None, :] < torch.tensor([[3], [S - 1]], device=device)
    expected = out.masked_fill(keep.logical_not()[:, :, None, None], 0.0)
    if what == "clear":
        clear(out, None, keep.sum(1, dtype=torch.int32))
    else:
        blank(out, None, keep)
    assert torch.equal(out, expected)
    assert bool(memory[..., 1::2].isnan().all())


def test_clear_of_packed_rows_reads_the_last_boundary(device: str) -> None:
    out, lse = random(device, torch.float32, 9, 3, 16), random(device, torch.float32, 3, 9)
    boundaries = torch.tensor([0, 4, 7], dtype=torch.int32, device=device)
    kept, kept_lse = out[:7].clone(), lse[:, :7].clone()
    clear(out.unsqueeze(0), lse.unsqueeze(0), boundaries[-1:])
    assert torch.equal(out, torch.cat([kept, torch.zeros_like(out[7:])]))
    assert torch.equal(lse, torch.cat([kept_lse, torch.full_like(lse[:, 7:], -math.inf)], dim=1))


def test_clear_of_more_tiles_than_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_tiles, "CLEARING_PROGRAMS", 2)
    monkeypatch.setattr(row_tiles, "cut", lambda width, itemsize: row_tiles.Cut(64, 2, 2, 128))
    monkeypatch.setattr(moving, "_clearing", moving._clearing.__wrapped__)  # remembered plans are cut otherwise
    out = random(device, torch.float32, 1, 70, 3, 40)
    expected = torch.cat([out[:, :3], torch.zeros_like(out[:, 3:])], dim=1)
    clear(out, None, torch.tensor([3], dtype=torch.int32, device=device))
    assert torch.equal(out, expected)
