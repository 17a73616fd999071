"""The package mindiesd: imported once and late, for that changes the process.

Importing it prepends to ASCEND_CUSTOM_OPP_PATH and sets `torch_npu.npu.config.allow_internal_format`: that is done only
for a request that one of its backends would take, to know whether it loads. CANN reads that path at its start: a
program that uses MindIE-SD's own ops (laser) imports mindiesd before it first touches a device.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import Any

from polyattn.vendor import Backend, Requires, loaded_last

PACKAGE = "mindiesd"
#: Our backends over it.
BACKENDS = ("mindie", "laser", "quant")

#: What mindiesd imports, the last two without declaring it.
REQUIRES = (
    Requires(PACKAGE, "3.1.0", "pip install mindiesd, after the torch and torch-npu that fit your CANN"),
    Requires("einops", "", "mindiesd imports it without declaring it: pip install einops"),
    Requires("safetensors", "", "mindiesd imports it without declaring it: pip install safetensors"),
)


@lru_cache(maxsize=1)
def _imported() -> Any:
    """The module, or what its import raised: each attempt would lengthen ASCEND_CUSTOM_OPP_PATH again."""
    try:
        return import_module(PACKAGE)
    except Exception as error:  # whatever a half-installed torch-npu or CANN raises
        return error


def package() -> Any:
    """The module; ImportError, with the cause, where it is installed and yet cannot be imported."""
    module = _imported()
    if isinstance(module, Exception):
        raise ImportError(
            f"{PACKAGE} is installed but cannot be imported ({type(module).__name__}: {module}); "
            f"backend={','.join(f'-{name}' for name in BACKENDS)!r} leaves its backends out"
        ) from module
    return module


def _bound() -> Any:
    """The module; what its import raised where it did."""
    module = _imported()
    if isinstance(module, Exception):
        raise module
    return module


def import_failure() -> str:
    """Why it cannot be imported, after trying; empty where it can."""
    try:
        package()
    except ImportError as error:
        return str(error)
    return ""


def once_imported(backend: Backend) -> Backend:
    """Its check asks last whether mindiesd can be imported: importing it changes the process, and may fail here."""
    return replace(backend, check=loaded_last(backend.check, backend.slots, PACKAGE, PACKAGE, _bound))
