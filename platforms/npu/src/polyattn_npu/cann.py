"""CANN, the runtime below torch-npu: which version it is, and what is known of the ops by it."""

from __future__ import annotations

import os
import platform
import re
import sys
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path

from polyattn.vendor import Machine
from polyattn_npu.detection import CANN_HOME, RUNTIME, has_installed

#: The name of its version among a machine's build facts.
FACT = "cann"
#: What its installers leave in the folder of the processor's architecture: of the whole, of the runtime alone.
RECORDS = ("ascend_toolkit_install.info", "ascend_nnae_install.info", "ascend_nnrt_install.info")


def installed() -> str:
    """Its version ("8.3.RC1"), by no device: as a loaded torch-npu tells it, else as its folder does; empty: unknown.

    torch-npu cannot where CANN is older than 8.1.
    """
    return (_told() if "torch_npu" in sys.modules else "") or recorded()


def recorded() -> str:
    """As its installer wrote it down in the folder that set_env.sh names; empty where no such record is."""
    home = os.environ.get(CANN_HOME)
    if not home:
        return ""
    folder = Path(home) / f"{platform.machine()}-linux"
    return next((version for name in RECORDS if (version := _version_in(folder / name))), "")


def _version_in(record: Path) -> str:
    """Of lines such as "version=8.3.RC1"; "innerversion=" is another number."""
    try:
        lines = record.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    return next((value.strip() for name, _, value in (line.partition("=") for line in lines) if name == "version"), "")


@lru_cache(maxsize=1)
def _told() -> str:
    try:
        return str(import_module("torch_npu.npu.utils").get_cann_version())
    except Exception:  # whatever a half-installed torch-npu raises: then nothing is known
        return ""


def version_of(machine: Machine) -> str:
    """The version on a machine: the fact that it states, else this process's where it is this one; empty: unknown."""
    stated = machine.build_facts.get(FACT)
    if stated is not None:
        return str(stated)
    return installed() if has_installed(machine, RUNTIME) else ""


def at_least(version: str, major: int, minor: int) -> bool:
    """Whether a version is known, and no older."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return numbers >= (major, minor)


def named(version: str) -> str:
    """ "CANN 8.2.RC1", or that it is not known, and who would tell."""
    if version:
        return f"CANN {version}"
    return (
        f"a CANN of unknown version (torch-npu tells it from 8.1 on, its folder where {CANN_HOME} names it, "
        f"a described machine as build_facts[{FACT!r}])"
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
