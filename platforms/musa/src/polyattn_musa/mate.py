"""mate, Moore Threads' FlashAttention-3 for MUSA: dense, padding and documents packed, pages; inference alone."""

from __future__ import annotations

from dataclasses import replace

from polyattn.vendor import (
    Backend,
    Features,
    Machine,
    Request,
    Requires,
    Slot,
    is_here,
    loaded_last,
    pools,
    varlen_padding,
)
from polyattn_musa import mate_package as package

_FORWARD = "polyattn_musa.mate_forward"


def check(request: Request, machine: Machine) -> tuple[str, ...]:
    """What features cannot say: another mate, the architecture, padding that packing would move, pages."""
    reasons = [package.BROKEN] if package.BROKEN and is_here(machine, package.PACKAGE, package.INTERFACE) else []
    if machine.arch and machine.arch != package.ARCH:
        reasons.append(f"mate is built for {package.ARCH} alone, and this is {machine.arch}")
    reasons += varlen_padding.packs_in_place(request, machine)
    return (*reasons, *_pages(request))


def _pages(request: Request) -> tuple[str, ...]:
    facts = request.structure_facts
    if request.structure_kind != "paged":
        return ()
    reasons = []
    if not facts.host:
        reasons.append("a block table on the device may name pages that are not there, and its kernel would read them")
    if facts.query_layout == "padded":
        reasons.append("padded queries over pages are not supported, only batched or packed ones")
    if not all(pools.row_major(pool) for pool in (request.k, request.v)):
        reasons.append("its kernel wants pools that are contiguous; this one would be copied")
    return tuple(reasons)


def backend() -> Backend:
    """`musa:mate`."""
    forward = Features(
        causal=True, window=True, softcap=True, lse=True, gqa=True, out=True,
        dtypes=frozenset({"float16", "bfloat16"}), head_dims=range(8, 513, 8),
    )  # fmt: skip
    unpaged = (
        Slot(f"{_FORWARD}:{kind}", replace(forward, kinds=frozenset({kind})))
        for kind in ("dense", "prefix_kv", "packed", "key_padding")
    )
    over_pages = replace(forward, kinds=frozenset({"paged"}), window=False)  # one may begin behind some pages
    slots = (*unpaged, Slot("polyattn_musa.mate_pages:paged", over_pages))
    hint = "from Moore Threads' releases, for MUSA SDK 4.3.6 and torch_musa 2.7 or later; the registry's is another"
    return Backend(
        "mate",
        slots,
        requires=(Requires(package.PACKAGE, "0.2", hint), Requires(package.WRAPPER, "", f"mate's wrapper, {hint}")),
        check=loaded_last(check, slots, package.PACKAGE, package.INTERFACE, package.operators),
        options=frozenset({"finite_pages"}),
        tolerances={"float16": 4e-3, "bfloat16": 3e-2},
    )
