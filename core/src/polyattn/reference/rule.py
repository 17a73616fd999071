"""What a call says beside its tensors and its structure: how scores are made, and which positions may meet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Window = tuple[int | None, int | None]


@dataclass(frozen=True)
class Rule:
    """scale, softcap: the scores. causal, window: the positions, both aligned bottom-right.

    gate: [B, at least Sq, H, Dv], the weight of VideoTiles's coarse term; None: no such term.
    """

    scale: float
    softcap: float
    causal: bool
    window: Window | None
    gate: torch.Tensor | None = None

    def positions(self, queries: int, keys: int, device: torch.device) -> torch.Tensor:
        """Bool [queries,keys]: the last query sits on the last key, and each earlier one a key before."""
        query = torch.arange(queries, device=device)[:, None] + (keys - queries)
        key = torch.arange(keys, device=device)[None, :]
        visible = torch.ones(queries, keys, dtype=torch.bool, device=device)
        left, right = self.window or (None, None)
        if self.causal:
            visible &= key <= query
        reach = queries + keys  # a side as long hides nothing, and one of 2**63 would wrap around
        if left is not None and left < reach:
            visible &= key >= query - left
        if right is not None and right < reach:
            visible &= key <= query + right
        return visible


def window_of(window: int | Window | None, causal: bool) -> Window | None:
    """The two inclusive counts that a window stands for: an int w is (w, 0) with causal, else (w, w).

    None where it hides nothing that causal does not: then it is no window.
    """
    if isinstance(window, int):
        window = (window, 0) if causal else (window, window)
    if window is not None and any(side is not None and side < 0 for side in window):
        raise ValueError(f"window: counts beside the diagonal cannot be negative, got {window}")
    return None if window is not None and window[0] is None and (causal or window[1] is None) else window
