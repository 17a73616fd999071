"""Which mate is installed, Moore Threads' or the registry's of that name: facts of files, nothing is loaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

PACKAGE, WRAPPER = "mate", "flash_attn_3"
INTERFACE = "flash_attn_interface"
#: The one architecture that it has code for.
ARCH = "mp_31"


def unlike() -> str:
    """Why the package called mate is not Moore Threads'; empty where it is, or where none is here."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return ""
    if any((Path(folder) / "mha_interface.py").is_file() for folder in spec.submodule_search_locations):
        return ""
    return "the package mate here is the registry's, which has no attention: install Moore Threads' from its releases"


#: Why the installed package cannot run; empty where it can.
BROKEN: str = unlike()
