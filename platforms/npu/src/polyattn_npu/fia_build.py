"""What the installed CANN's packed call of `npu_fused_infer_attention_score` takes: facts of its version."""

from __future__ import annotations

from dataclasses import dataclass

from polyattn_npu import cann


@dataclass(frozen=True)
class FiaBuild:
    """The packed (TND) call under a mask.

    head_dims   of q, k and v alike
    dtypes      what all sources agree on
    documents   that it takes at most
    """

    head_dims: frozenset[int]
    dtypes: frozenset[str] = frozenset({"bfloat16"})
    documents: int = 4096

    def packs(self, dtype: str, dim: int, documents: int) -> bool:
        """Whether the packed call takes so many documents of this dtype and head dim."""
        return dtype in self.dtypes and dim in self.head_dims and documents <= self.documents


#: The first CANN whose packed call is known to take head dim 64, and 128. Others refuse 128 as well, and of an unknown
#: one nothing is asked.
_SINCE_64, _SINCE_128 = (8, 5), (8, 2)


def build_of(version: str) -> FiaBuild:
    """The facts of one CANN."""
    known = ((64, _SINCE_64), (128, _SINCE_128))
    return FiaBuild(frozenset(dim for dim, since in known if cann.at_least(version, *since)))


#: That of this process.
BUILD = build_of(cann.installed())
