"""FlashAttention 4's functions, found although its package shares a name with FlashAttention 2's."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = "flash-attn-4"
_MODULE = "flash_attn.cute.interface"
#: A file of its folder that FlashAttention 2's older copy of that folder has not.
_OWN_FILE = Path("cute", "block_sparsity.py")
_WAY_OUT = f"install {PACKAGE} anew, after flash-attn where both are wanted"

_SHARED = frozenset(
    {"q", "k", "v", "softmax_scale", "causal", "softcap", "num_splits", "return_lse"}
)  # fmt: skip
_LENGTHS = frozenset({"cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "max_seqlen_q", "max_seqlen_k"})
#: The names by which arguments are passed.
_ARGUMENTS = {
    "_flash_attn_fwd": _SHARED | _LENGTHS | {"window_size_left", "window_size_right", "out"},
    "flash_attn_func": _SHARED | {"window_size", "deterministic"},
    "flash_attn_varlen_func": _SHARED | _LENGTHS | {"window_size", "deterministic"},
}


class Functions(NamedTuple):
    """forward: without gradients, into a buffer where one is given; dense, varlen: with gradients."""

    forward: Callable[..., tuple[Any, ...]]
    dense: Callable[..., tuple[Any, Any]]
    varlen: Callable[..., tuple[Any, Any]]


def broken_install() -> str:
    """Why the distribution, although it is here, cannot be imported; empty where it can, or is not here at all.

    Read off files: importing its parent package would load FlashAttention 2, or fail where that one is broken.
    """
    try:
        version(PACKAGE)
    except PackageNotFoundError:
        return ""
    spec = importlib.util.find_spec("flash_attn")
    folders = () if spec is None else spec.submodule_search_locations or ()
    if any((Path(folder) / _OWN_FILE).is_file() for folder in folders):
        return ""
    return (
        f"{PACKAGE} {version(PACKAGE)} is installed, but flash_attn/{_OWN_FILE.as_posix()} is not where Python looks "
        f"for flash_attn ({', '.join(folders) or 'nowhere'}): another package hides or has replaced it; {_WAY_OUT}"
    )


@lru_cache(maxsize=1)
def functions() -> Functions:
    """Imports them. RuntimeError: the install is broken, the import fails, or they take other arguments."""
    if problem := broken_install():
        raise RuntimeError(problem)
    try:
        module = importlib.import_module(_MODULE)
    except Exception as error:  # versions of its compiler that do not fit raise many kinds
        raise RuntimeError(
            f"{PACKAGE}: importing {_MODULE} failed with {type(error).__name__}: {error}; check its nvidia-cutlass-dsl "
            "and quack-kernels, or choose another backend"
        ) from error
    for name, needed in _ARGUMENTS.items():
        taken = inspect.signature(getattr(module, name)).parameters if hasattr(module, name) else {}
        if missing := needed - set(taken):
            raise RuntimeError(
                f"{PACKAGE}: {_MODULE}.{name} does not take {', '.join(sorted(missing))}; FlashAttention 2 may have "
                f"replaced it: {_WAY_OUT}"
            )
    return Functions(*(getattr(module, name) for name in _ARGUMENTS))
