"""FlashAttention 2, the package flash-attn, over Composable Kernel: documents, padding, pages of 128, gradients."""

from __future__ import annotations

import importlib
import importlib.util
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    flash2,
    flash2_calls,
    is_here,
    loaded_last,
    prefix,
    varlen,
    varlen_padding,
)
from polyattn_rocm import ck
from polyattn_rocm.rows import ROWS

PACKAGE = "flash-attn"
HINT = "pip install flash-attn --no-build-isolation (a source distribution; it compiles with hipcc)"
#: Read by the package where it is imported: exactly "TRUE" makes it run its Triton kernels (`flash_attn_triton`).
TRITON_ROUTE = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
INTERFACE = "flash_attn.flash_attn_interface"
_EXTENSION = "flash_attn_2_cuda"
#: What 2.8.3 builds its extension for.
_ARCHS = ("gfx90a", "gfx942", "gfx950")


def missing_extension() -> str:
    """Why the distribution, although it is here, has no kernels; empty where it has, or is not here at all."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return ""
    if importlib.util.find_spec(_EXTENSION) is not None:
        return ""
    return f"{PACKAGE} {found} is installed without its extension {_EXTENSION}: it was built for its Triton route alone"


#: Why the installed package cannot run; empty where it can.
BROKEN: str = missing_extension()


@lru_cache(maxsize=2)
def functions(of_triton: bool) -> tuple[Any, Any]:
    """The package's two functions, dense and packed, once it is known which kernels they run.

    It read the variable where it was imported, perhaps before that was set as the machine's facts have it.
    """
    module = importlib.import_module(INTERFACE)
    runs_triton = bool(getattr(module, "USE_TRITON_ROCM", False))
    if runs_triton != of_triton:
        kernels = "Triton kernels" if runs_triton else "Composable Kernel"
        value = "TRUE" if of_triton else "FALSE"
        raise RuntimeError(
            f"flash_attn runs its {kernels}, as {TRITON_ROUTE} was when it was imported, and not those asked for: "
            f"set it to {value} before the process starts"
        )
    return module.flash_attn_func, module.flash_attn_varlen_func


def bound() -> tuple[Any, Any]:
    """The two functions over Composable Kernel."""
    return functions(False)


documents = partial(flash2_calls.documents, bound)
#: Its backward adds up in any order, or in one, which is slower.
_fast, _steady = (partial(ck.documents, partial(documents, steady)) for steady in (False, True))

dense, dense_steady = (partial(flash2_calls.batched, bound, steady) for steady in (False, True))
prefix_kv, prefix_kv_steady = partial(prefix, dense), partial(prefix, dense_steady)
packed, packed_steady = partial(varlen.packed, _fast, ROWS), partial(varlen.packed, _steady, ROWS)
key_padding = partial(varlen_padding.key_padding, _fast, ROWS)
key_padding_steady = partial(varlen_padding.key_padding, _steady, ROWS)
paged = partial(flash2.paged, partial(flash2_calls.pages, bound))


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: which of its kernels the package runs here, whether it has them, its rules."""
    if machine.env.get(TRITON_ROUTE) == "TRUE":
        return (f"{TRITON_ROUTE}=TRUE makes the package run its Triton kernels instead: ask for flash_attn_triton",)
    reasons = [BROKEN] if BROKEN and is_here(machine, PACKAGE, INTERFACE) else []
    return (*reasons, *ck.other_arch(machine, *_ARCHS), *flash2.objections(request, machine))


def backend() -> Backend:
    """`rocm:flash_attn`. No softcap: its C++ side names that argument and does not read it."""
    forward = Features(
        causal=True, window=True, lse=True, gqa=True, deterministic=True, out=True, capture=True,
        dtypes=flash2.DTYPES, head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    slots = flash2_calls.slots(__name__, forward, ck.PAGE_SIZES)
    return Backend(
        "flash_attn",
        slots,
        requires=(Requires(PACKAGE, "2.8", HINT),),
        check=loaded_last(check, slots, PACKAGE, INTERFACE, bound),
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
