"""Which mate is installed, Moore Threads' or the registry's of that name, and the functions of the right one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

PACKAGE, WRAPPER = "mate", "flash_attn_3"
INTERFACE = "flash_attn_interface"
#: The one architecture that it has code for.
ARCH = "mp_31"

_SHARED = frozenset(("q", "k", "v", "softmax_scale", "causal", "window_size", "softcap", "return_softmax_lse"))
_LENGTHS = frozenset(("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "seqused_k", "page_table"))
#: An argument that no other maker's FlashAttention-3 has: its wrapper claims the name of NVIDIA's module.
_ITS_OWN = "cp_world_size"


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


@lru_cache(maxsize=1)
def operators() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`flash_attn_func` and `flash_attn_varlen_func`, once they are known to be mate's and to take what they get."""
    module = importlib.import_module(INTERFACE)
    functions = (module.flash_attn_func, module.flash_attn_varlen_func)
    for function, needed in zip(functions, (_SHARED, _SHARED | _LENGTHS), strict=True):
        lacking = sorted((needed | {_ITS_OWN}) - set(inspect.signature(function).parameters))
        if lacking:
            raise RuntimeError(
                f"{INTERFACE}.{function.__name__} does not take {', '.join(lacking)}: it is not mate 0.2's, whose "
                "wrapper is the distribution flash_attn_3; install that, or choose another backend"
            )
    return functions
