"""Dense: every query sees every key."""

from __future__ import annotations

from typing import ClassVar

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure


class Dense(Structure):
    """Every query sees every key; the structure of a call that names none.

    >>> import torch, polyattn as pa
    >>> q = torch.randn(1, 4, 2, 8)
    >>> pa.attention(q, q, q, structure=pa.Dense()).shape
    torch.Size([1, 4, 2, 8])
    """

    kind: ClassVar[str] = "dense"

    def __init__(self) -> None:
        self._freeze(facts=StructureFacts())

    def __repr__(self) -> str:
        return "Dense()"
