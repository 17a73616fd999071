"""Which CANN is below torch-npu: read once, from torch-npu itself."""

from __future__ import annotations

import re
from functools import lru_cache
from importlib import import_module

from polyattn.vendor import Machine

#: The name of its version among a machine's build facts.
FACT = "cann"


@lru_cache(maxsize=1)
def installed() -> str:
    """Its version ("8.3.RC1") as torch-npu tells it; empty where that cannot: it knows CANN from 8.1.RC1 on."""
    try:
        return str(import_module("torch_npu.npu.utils").get_cann_version())
    except Exception:  # whatever a half-installed torch-npu raises: then nothing is known
        return ""


def version_of(machine: Machine) -> str:
    """The version on a machine: a fact of a described one, else of this process."""
    return str(machine.build_facts.get(FACT, installed()))


def at_least(version: str, major: int, minor: int) -> bool:
    """Whether a version is known, and no older."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    return numbers >= (major, minor)


def named(version: str) -> str:
    """ "CANN 8.2.RC1", or that it is not known."""
    return f"CANN {version}" if version else "a CANN whose version torch-npu does not tell"
