"""FlashAttention 2, the package flash-attn: dense, padding and documents packed, pages of 256 rows, gradients."""

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
from polyattn_cuda import arch
from polyattn_cuda.rows import ROWS

PACKAGE = "flash-attn"
PAGE_SIZES = range(256, 65537, 256)
_INTERFACE = "flash_attn.flash_attn_interface"
_EXTENSION = "flash_attn_2_cuda"
#: Devices whose shared memory does not hold a backward's tiles of wider heads.
_SMALL = ("sm_86", "sm_87", "sm_89", "sm_12")
_WIDEST_BACKWARD = 192


def missing_extension() -> str:
    """Why the distribution, although it is here, has no kernels; empty where it has, or is not here at all."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return ""
    if importlib.util.find_spec(_EXTENSION) is not None:
        return ""
    return f"{PACKAGE} {found} is installed without its extension {_EXTENSION}: it was built with SKIP_CUDA_BUILD"


#: Why the installed package cannot run; empty where it can.
BROKEN: str = missing_extension()


@lru_cache(maxsize=1)
def _bound() -> tuple[Any, Any]:
    module = importlib.import_module(_INTERFACE)
    return module.flash_attn_func, module.flash_attn_varlen_func


documents = partial(flash2_calls.documents, _bound)
#: Its backward adds up in any order, or in one, which is slower.
_fast, _steady = partial(documents, False), partial(documents, True)

dense, dense_steady = (partial(flash2_calls.batched, _bound, steady) for steady in (False, True))
prefix_kv, prefix_kv_steady = partial(prefix, dense), partial(prefix, dense_steady)
packed = partial(varlen.packed, partial(flash2.documents, _fast), ROWS)
packed_steady = partial(varlen.packed, partial(flash2.documents, _steady), ROWS)
key_padding = partial(varlen_padding.key_padding, _fast, ROWS)
key_padding_steady = partial(varlen_padding.key_padding, _steady, ROWS)
paged = partial(flash2.paged, partial(flash2_calls.pages, _bound))


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: FlashAttention 2's rules, wide heads' gradients, and a package without its kernels."""
    reasons = [BROKEN] if BROKEN and is_here(machine, PACKAGE, _INTERFACE) else []
    reasons += arch.arch_below(machine, arch.FLASH2)
    reasons += flash2.objections(request, machine)
    if request.grad and request.head_dim > _WIDEST_BACKWARD and machine.arch.startswith(_SMALL):
        reasons.append(f"gradients of head_dim {request.head_dim} on {machine.arch}, only up to {_WIDEST_BACKWARD}")
    return tuple(reasons)


def backend() -> Backend:
    """`cuda:flash_attn`."""
    hint = "pip install flash-attn --no-build-isolation (a source distribution; it compiles for hours without a wheel)"
    forward = Features(
        causal=True, window=True, softcap=True, lse=True, gqa=True, deterministic=True, out=True, capture=True,
        dtypes=flash2.DTYPES, head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    slots = flash2_calls.slots(__name__, forward, PAGE_SIZES)
    return Backend(
        "flash_attn",
        slots,
        requires=(Requires(PACKAGE, "2.8", hint),),
        check=loaded_last(check, slots, PACKAGE, _INTERFACE, _bound),
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
