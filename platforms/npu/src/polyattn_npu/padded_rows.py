"""Samples of unequal lengths: rows without a key are blanked, packed rows become a padded batch and packed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyattn.vendor import TORCH_ROWS, Result


def rows_with_a_key(ranges: Sequence[tuple[int, int]], width: int, device: torch.device) -> torch.Tensor | None:
    """Bool [B,width], True within a sample's half-open range; None where every row has a key."""
    if all(pair == (0, width) for pair in ranges):
        return None
    bounds = torch.tensor(ranges, dtype=torch.int64, device="cpu").reshape(-1, 2)
    row = torch.arange(width, device="cpu")
    return ((row >= bounds[:, :1]) & (row < bounds[:, 1:])).to(device)


def blank(result: torch.Tensor, lse: torch.Tensor | None, kept: torch.Tensor | None) -> None:
    """A fresh result [B,S,H,D] and its LSE [B,H,S] become 0 and -inf in rows that are not kept."""
    if kept is not None:
        TORCH_ROWS.blank(result, lse, kept)


def places(lengths: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
    """Flat positions b*width+i [n] int64 of packed rows in a batch padded to `width`."""
    rows = [torch.arange(length, device="cpu") + row * width for row, length in enumerate(lengths)]
    return torch.cat(rows).to(device) if rows else torch.empty(0, dtype=torch.int64, device=device)


def pad_rows(rows: torch.Tensor, index: torch.Tensor, batch: int, width: int) -> torch.Tensor:
    """Packed [n,H,D] -> [batch,width,H,D], 0 between."""
    if rows.shape[0] == batch * width:
        return rows.view(batch, width, *rows.shape[1:])
    return TORCH_ROWS.unpack(rows, None, index, None, batch, width)[0]


def unpad_rows(result: torch.Tensor, lse: torch.Tensor | None, index: torch.Tensor) -> Result:
    """[B,width,H,D] and [B,H,width] -> packed [n,H,D] and [H,n]."""
    if index.shape[0] == result.shape[0] * result.shape[1]:
        return result.flatten(0, 1), None if lse is None else lse.transpose(0, 1).flatten(1)
    if lse is None:
        return TORCH_ROWS.pack((result,), index)[0], None
    rows, columns = TORCH_ROWS.pack((result, lse.transpose(1, 2).unsqueeze(-1)), index)
    return rows, columns.squeeze(-1).transpose(0, 1)
