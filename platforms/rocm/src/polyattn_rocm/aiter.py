"""AITER, AMD's own kernels: dense, padding and documents packed, gradients; no pages.

It sends a call to hand-written assembly or to Composable Kernel by rules of its own. What the assembly leaves out
without a word, read in amd-aiter 0.1.7, is refused here for the calls that would get there.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    flash2,
    is_here,
    loaded_last,
    prefix,
    varlen,
    varlen_padding,
)
from polyattn_rocm import aiter_forward, ck
from polyattn_rocm.rows import ROWS

PACKAGE = "amd-aiter"
_ARCHS = ("gfx942", "gfx950")
#: dtype and head dim of the calls that reach its assembly.
_BY_HAND = ("bfloat16", 128)
#: A device of gfx942 whose number of compute units its assembly's loader does not know: it launches nothing loaded.
_UNLOADED = "MI300A"


def shadowed() -> str:
    """Why `import aiter` would find another distribution's package; empty where it does not."""
    try:
        found = version("aiter")
    except PackageNotFoundError:
        return ""
    return (
        f"aiter {found}, a package for asynchronous iterators, is installed where {PACKAGE} puts its own: "
        f"pip uninstall aiter, and install {PACKAGE} again"
    )


#: Why the installed package cannot be imported; empty where it can.
BROKEN: str = shadowed()

#: Its backward adds up in any order, or in one, which is slower.
_fast, _steady = (partial(ck.documents, partial(aiter_forward.documents, steady)) for steady in (False, True))

dense, dense_steady = (partial(aiter_forward.batched, steady) for steady in (False, True))
prefix_kv, prefix_kv_steady = partial(prefix, dense), partial(prefix, dense_steady)
packed, packed_steady = partial(varlen.packed, _fast, ROWS), partial(varlen.packed, _steady, ROWS)
key_padding = partial(varlen_padding.key_padding, _fast, ROWS)
key_padding_steady = partial(varlen_padding.key_padding, _steady, ROWS)


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: architectures, what its assembly leaves out, gradients that it aligns otherwise."""
    reasons = [BROKEN] if BROKEN and is_here(machine, PACKAGE, "aiter") else []
    reasons += ck.other_arch(machine, *_ARCHS)
    reasons += flash2.objections(request, machine)
    if (request.dtype, request.head_dim) == _BY_HAND:
        reasons += _by_hand(request, machine)
    if request.grad and not request.deterministic:
        reasons += _backward(request)
    return tuple(reasons)


def _by_hand(request: Request, machine: Machine) -> list[str]:
    which = "its assembly, which serves bfloat16 at head_dim 128,"
    reasons = []
    if request.softcap:
        reasons.append(f"softcap {request.softcap}: {which} does not read it (float16, or rocm:triton, is served)")
    if request.window is not None and request.window[0] == 0:
        reasons.append(f"window {request.window}: {which} refuses a left side of 0")
    if _UNLOADED in machine.name:
        reasons.append(f"{which} is not loaded on {machine.name}")
    return reasons


def _backward(request: Request) -> list[str]:
    """Its assembly's backward aligns causal at the top left, and reads no window without a side above 0."""
    way = "deterministic=True takes Composable Kernel's"
    reasons = []
    square = request.structure_facts.same_lengths if request.structure_kind == "packed" else _square(request)
    if request.causal and not square:
        reasons.append(f"gradients of causal calls with other queries than keys are aligned top-left: {way}")
    if request.window is not None and not any(side for side in request.window):
        reasons.append(f"gradients under window {request.window}: its assembly does not read it: {way}")
    return reasons


def _square(request: Request) -> bool:
    prefix_of = request.structure_facts.common_prefix if request.structure_kind == "prefix_kv" else None
    queries, keys = request.q.shape[-3], request.k.shape[-3] if prefix_of is None else prefix_of
    if request.structure_facts.queries == "same":  # as many of the queries as of the keys
        return True
    return queries == keys


def _slots() -> tuple[Slot, ...]:
    """Each structure with an LSE, which has no gradient; with gradients; with the same gradients run to run.

    No gradients under a softcap: the backward is not told of it.
    """
    forward = Features(
        causal=True, window=True, softcap=True, lse=True, gqa=True, deterministic=True, out=True, capture=True,
        dtypes=flash2.DTYPES, head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    with_grad = replace(forward, lse=False, softcap=False, backward=True)
    slots = []
    for kind in ("dense", "prefix_kv", "packed", "key_padding"):
        kinds = frozenset({kind})
        slots.append(Slot(f"{__name__}:{kind}", replace(forward, kinds=kinds)))
        slots.append(Slot(f"{__name__}:{kind}", replace(with_grad, kinds=kinds, deterministic=False)))
        slots.append(Slot(f"{__name__}:{kind}_steady", replace(with_grad, kinds=kinds)))
    return tuple(slots)


def backend() -> Backend:
    """`rocm:aiter`."""
    hint = "AITER's own instructions (pip's amd-aiter is a development wheel that compiles at its first call)"
    slots = _slots()
    return Backend(
        "aiter",
        slots,
        requires=(Requires(PACKAGE, "0.1.7", hint),),
        check=loaded_last(check, slots, PACKAGE, "aiter", aiter_forward.bound),
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
