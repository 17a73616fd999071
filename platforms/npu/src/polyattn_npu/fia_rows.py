"""Rows of samples of unequal lengths: which see nothing and are blanked, and packed ones spread over a padded batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from polyattn.vendor import TORCH_ROWS, Result, written


def unseeing_rows(seeing: Sequence[tuple[int, int]], width: int, device: torch.device) -> torch.Tensor | None:
    """Bool [B,width], False where a sample's half-open range of rows sees a key; None where every row does."""
    if all(pair == (0, width) for pair in seeing):
        return None
    ranges = torch.tensor(seeing, dtype=torch.int64, device="cpu")
    row = torch.arange(width, device="cpu")
    return ((row < ranges[:, :1]) | (row >= ranges[:, 1:])).to(device)


def blanked(
    result: torch.Tensor, lse: torch.Tensor | None, unseeing: torch.Tensor | None, out: torch.Tensor | None
) -> Result:
    """A fresh result [B,S,H,D] and its LSE [B,H,S], 0 and -inf where rows see nothing; in `out` where that is given."""
    if unseeing is not None:
        result.masked_fill_(unseeing.unsqueeze(-1).unsqueeze(-1), 0.0)
        lse = None if lse is None else lse.masked_fill_(unseeing.unsqueeze(1), float("-inf"))
    return written(out, result), lse


def places(lengths: Sequence[int], width: int, device: torch.device) -> torch.Tensor:
    """Flat positions b*width+i [n] int64 of packed rows in a batch padded to `width`."""
    rows = [torch.arange(length, device="cpu") + row * width for row, length in enumerate(lengths)]
    return torch.cat(rows).to(device) if rows else torch.empty(0, dtype=torch.int64, device=device)


def spread(rows: torch.Tensor, index: torch.Tensor, batch: int, width: int) -> torch.Tensor:
    """Packed [n,H,D] -> [batch,width,H,D], 0 between."""
    if rows.shape[0] == batch * width:
        return rows.view(batch, width, *rows.shape[1:])
    return TORCH_ROWS.unpack(rows, None, index, None, batch, width)[0]


def gathered(result: torch.Tensor, lse: torch.Tensor | None, index: torch.Tensor) -> Result:
    """[B,width,H,D] and [B,H,width] -> packed [n,H,D] and [H,n]."""
    flat = None if lse is None else lse.transpose(0, 1).flatten(1)
    if index.shape[0] == result.shape[0] * result.shape[1]:
        return result.flatten(0, 1), flat
    return result.flatten(0, 1).index_select(0, index), None if flat is None else flat.index_select(1, index)
