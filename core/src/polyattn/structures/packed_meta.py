"""PackedMeta: what slots get of packed documents on one device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from polyattn.structures.base import Meta
from polyattn.structures.intervals import Intervals

Lengths = tuple[int, ...]


@dataclass(eq=False)
class PackedMeta(Meta):
    """Packed documents on one device.

    cu_q, cu_k    int32 [documents + 1]; the same tensor where queries and keys share boundaries
    max_q, max_k  the longest document (or the capacity)
    lengths_q/_k  per document, where the host knows them; `Packed.update_` replaces them
    spans         per document, in its own key positions
    fixed         False: `Packed.update_` may change the lengths between two replays of a graph
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    lengths_q: Lengths | None
    lengths_k: Lengths | None
    spans: tuple[Intervals, ...] | None
    fixed: bool = True
