"""What a machine's CANN decides of the ops above it, and how a refusal names that CANN."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from polyattn.vendor import Machine
from polyattn_npu import cann
from polyattn_npu.detection import RUNTIME, has_installed


def version_of(machine: Machine) -> str:
    """The version on a machine: the fact that it states, else this process's where it is this one; empty: unknown."""
    stated = machine.build_facts.get(cann.FACT)
    if stated is not None:
        return str(stated)
    return cann.installed() if has_installed(machine, RUNTIME) else ""


def at_least(version: str, major: int, minor: int) -> bool:
    """Whether a version is known, and no older."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return numbers >= (major, minor)


def named(version: str) -> str:
    """ "CANN 8.2.RC1", or that it is not known, and who would tell."""
    if version:
        return f"CANN {version}"
    return (
        f"a CANN of unknown version (torch-npu tells it from 8.1 on, its folder where {cann.CANN_HOME} names it, "
        f"a described machine as build_facts[{cann.FACT!r}])"
    )


@dataclass(frozen=True)
class PackedFia:
    """What `npu_fused_infer_attention_score` takes packed (TND) under a mask.

    head_dims   of q, k and v alike
    dtypes      what all sources agree on
    documents   that it takes at most
    """

    head_dims: frozenset[int]
    dtypes: frozenset[str] = frozenset({"bfloat16"})
    documents: int = 4096

    def takes(self, dtype: str, dim: int, documents: int) -> bool:
        """Whether it takes so many documents of this dtype and head dim."""
        return dtype in self.dtypes and dim in self.head_dims and documents <= self.documents


#: The first CANN whose packed call is known to take head dim 64, and 128. Others refuse 128 as well, and of an unknown
#: one nothing is asked.
_SINCE_64, _SINCE_128 = (8, 5), (8, 2)


@lru_cache(maxsize=16)
def packed_fia(version: str) -> PackedFia:
    """Of one CANN."""
    known = ((64, _SINCE_64), (128, _SINCE_128))
    return PackedFia(frozenset(dim for dim, since in known if at_least(version, *since)))
