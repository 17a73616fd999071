"""Attention over many ranks: what is spread, what every rank holds, and how calls are glued together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from polyattn.distributed.joint import Joint, Replicated
from polyattn.distributed.parallel import SequenceParallel

if TYPE_CHECKING:
    from polyattn.distributed.sharding import gather, shard

__all__ = ["Joint", "Replicated", "SequenceParallel", "gather", "shard"]


def __getattr__(name: str) -> object:
    if name not in ("gather", "shard"):
        raise AttributeError(f"module 'polyattn.distributed' has no attribute {name!r}")
    from polyattn.distributed import sharding  # imports torch.distributed, which one rank never needs

    value: object = getattr(sharding, name)
    globals()[name] = value
    return value
