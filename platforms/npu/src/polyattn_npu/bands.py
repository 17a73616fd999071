"""Causal and windows as Ascend's sparse modes say them, for rows that all have a key and keys that some row sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from polyattn.vendor import Window, device_constant

#: Rows and columns of the mask that the sparse modes for causal and windows take, whatever the lengths.
COMPRESSED = 2048
#: An op's names of a window's two sides, left and right.
WindowArgs = tuple[str, str]
#: What the ops take for unbounded, which is their default too.
UNBOUNDED = 2147483647


@device_constant(limit=16)  # 4 MiB each
def compressed_mask(device: torch.device) -> torch.Tensor:
    """Bool [2048,2048], True above the diagonal. All calls on a device share it: nobody writes into it."""
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device="cpu").triu_(1).to(device)


@dataclass(frozen=True)
class Band:
    """Rows [q_start, q_stop) see keys of [k_start, k_stop) alone, beside the bottom-right diagonal of these ranges.

    left, right    inclusive counts beside it, None unbounded
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    left: int | None
    right: int | None

    @property
    def queries(self) -> int:
        return self.q_stop - self.q_start

    @property
    def keys(self) -> int:
        return self.k_stop - self.k_start


def window_sides(causal: bool, window: Window) -> tuple[int | None, int | None]:
    """The window's sides, with the right one that causal asks."""
    left, right = (None, None) if window is None else window
    return left, 0 if causal else right


def band_of(queries: int, keys: int, left: int | None, right: int | None) -> Band | None:
    """What is left of `queries` x `keys` once rows that see nothing and keys that nobody sees are cut off at both ends.

    The sides given may be negative, those of the answer are not. None where no row sees a key.
    """
    shift = keys - queries
    start = 0 if right is None else max(0, -shift - right)
    stop = queries if left is None else min(queries, queries + left)
    if keys == 0 or start >= stop or (left is not None and right is not None and left + right < 0):
        return None
    first = 0 if left is None else max(0, start + shift - left)
    last = keys if right is None else min(keys, stop + shift + right)
    moved = start + shift - first - (last - first - stop + start)  # how far the diagonal of what is left lies off
    return Band(
        start, stop, first, last, None if left is None else left - moved, None if right is None else right + moved
    )


def sparse_mode_args(
    queries: int, keys: int, left: int | None, right: int | None, device: torch.device, names: WindowArgs
) -> dict[str, Any]:
    """The ops' arguments for a band (or for the longest of several documents); `names` are those of a window's sides.

    Without a mask the ops ignore all of these: where every row sees every key there are none.
    """
    left = None if left is not None and left >= keys - 1 else left
    right = None if right is not None and right >= queries - 1 else right
    if left is None and right is None:
        return {}
    mask = compressed_mask(device)
    if left is None and right == 0:
        return {"atten_mask": mask, "sparse_mode": 3}
    before, after = (UNBOUNDED if side is None else side for side in (left, right))
    return {"atten_mask": mask, "sparse_mode": 4, names[0]: before, names[1]: after}
