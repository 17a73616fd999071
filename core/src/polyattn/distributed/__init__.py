"""Attention over many ranks: what is spread, what every rank holds, and how calls are glued together."""

from polyattn.distributed.joint import Joint, Replicated
from polyattn.distributed.parallel import SequenceParallel

__all__ = ["Joint", "Replicated", "SequenceParallel"]
