"""torch's own FlashAttention over packed documents on these devices, as far as the installed torch has it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from polyattn.vendor import Backend, Features, Machine, Request, Slot, flash2, torch_varlen, varlen, varlen_padding
from polyattn_cuda import arch
from polyattn_cuda.rows import ROWS

PAGE_SIZES = range(256, 65537, 256)


def _more() -> dict[str, int]:
    """One split keeps the answer free of the other documents, and torch on this kernel rather than on cuDNN."""
    return {"num_splits": 1} if "num_splits" in torch_varlen.PARAMETERS else {}


documents = partial(torch_varlen.documents, _more)
dense = partial(flash2.dense, documents)
packed = partial(varlen.packed, partial(flash2.documents, documents), ROWS)
key_padding = partial(varlen_padding.key_padding, documents, ROWS)
paged = partial(flash2.paged, partial(torch_varlen.pages, _more))


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: FlashAttention 2's rules, and a scale that torch 2.10 does not take."""
    objections = (*arch.arch_below(machine, arch.FLASH2), *flash2.objections(request, machine))
    return (*torch_varlen.other_scale(request), *objections)


def _slots() -> tuple[Slot, ...]:
    """Each structure twice: with an LSE, which has no gradient, and with gradients, which differ run to run."""
    takes = torch_varlen.PARAMETERS
    forward = Features(
        causal=True, window="window_size" in takes, lse=True, gqa="enable_gqa" in takes, deterministic=True, out=True,
        capture=True, dtypes=flash2.DTYPES, head_dims=flash2.HEAD_DIMS,
    )  # fmt: skip
    trained = replace(forward, lse=False, deterministic=False, backward=True)
    slots = [
        Slot(f"{__name__}:{kind}", replace(features, kinds=frozenset({kind})))
        for kind in ("dense", "packed", "key_padding")
        for features in (forward, trained)
    ]
    if "block_table" in takes:
        over_pages = replace(forward, kinds=frozenset({"paged"}), capture=False, page_sizes=PAGE_SIZES)
        slots.append(Slot(f"{__name__}:paged", over_pages))
    return tuple(slots)


def backend() -> Backend:
    """`cuda:torch_varlen`, with the features of the installed torch."""
    return Backend(
        "torch_varlen",
        _slots(),
        requires=(torch_varlen.needs("2.10"),),
        check=check,
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
