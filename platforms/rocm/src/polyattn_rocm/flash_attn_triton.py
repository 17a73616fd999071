"""flash-attn's Triton kernels for these devices, which the package runs where its variable was set before the import.

They leave windows, softcaps and block tables behind without a word, so no slot here claims one; that their packed LSE
is [T,H] and not [H,T], and what causal does to it, is put right here and in `square.py`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    flash2,
    flash2_calls,
    loaded_last,
    prefix,
    varlen_padding,
)
from polyattn_rocm import square
from polyattn_rocm.flash_attn import HINT, INTERFACE, PACKAGE, TRITON_ROUTE, functions
from polyattn_rocm.rows import ROWS

#: The only release line whose silences were read.
_KNOWN = "2.8"
_WHY = "its kernel writes zeros into other documents' LSE, or behind it, for every tile of queries that sees nothing"


def _bound() -> tuple[Any, Any]:
    dense, packed = functions(True)
    return dense, partial(_heads_first, packed)


def _heads_first(packed: Any, **call: Any) -> Any:
    """The packed function with its LSE [T,H] as the package documents it, [H,T]."""
    answer = packed(**call)
    if not call["return_attn_probs"]:
        return answer
    out, lse, probs = answer
    return out, lse.T, probs


documents = partial(flash2_calls.documents, _bound, False)
dense = partial(square.dense_seeing, documents)
prefix_kv = partial(prefix, dense)
packed = partial(square.packed, documents, ROWS)
key_padding = partial(varlen_padding.key_padding, documents, ROWS)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: whether the package runs these kernels here, and documents that they would overrun."""
    reasons = []
    asked, found = machine.env.get(TRITON_ROUTE), machine.versions.get(PACKAGE, _KNOWN)
    if asked != "TRUE":
        seen = "is not set" if asked is None else f"is {asked!r}"
        reasons.append(f"{TRITON_ROUTE} {seen}: the package runs these kernels only where it is 'TRUE' at start")
    if not (found.partition("+")[0] + ".").startswith(_KNOWN + "."):
        reasons.append(f"package {PACKAGE} {found}: what its Triton kernels leave out is known of {_KNOWN}.x alone")
    return (*reasons, *square.objections(request, _WHY))


def _slots() -> tuple[Slot, ...]:
    """Each structure twice: with an LSE, which has no gradient, and with gradients, in an order not promised."""
    forward = Features(
        causal=True, lse=True, gqa=True, deterministic=True, out=True, capture=True, dtypes=flash2.DTYPES,
        head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    trained = replace(forward, lse=False, deterministic=False, backward=True)
    return tuple(
        Slot(f"{__name__}:{kind}", replace(features, kinds=frozenset({kind})))
        for kind in ("dense", "prefix_kv", "packed", "key_padding")
        for features in (forward, trained)
    )


def backend() -> Backend:
    """`rocm:flash_attn_triton`."""
    slots = _slots()
    return Backend(
        "flash_attn_triton",
        slots,
        requires=(Requires(PACKAGE, "2.8", f"{TRITON_ROUTE}=TRUE {HINT}"),),
        check=loaded_last(check, slots, PACKAGE, INTERFACE, _bound),
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
