"""CANN, the runtime below torch-npu: which version this process has, by no device and no import of torch-npu."""

from __future__ import annotations

import os
import platform
import sys
from functools import lru_cache
from importlib import import_module
from pathlib import Path

#: Where its set_env.sh says that it is.
CANN_HOME = "ASCEND_HOME_PATH"
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
