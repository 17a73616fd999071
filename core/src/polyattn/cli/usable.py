"""Whether a backend would take any call on a machine: the resolver's answers to plain calls of all that it claims."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import product

from polyattn.cli.asked import Asked, request_of
from polyattn.door.resolution import resolve
from polyattn.vendor import Accepted, Backend, Features, Machine, Request

_HEADS = 8
#: Sides of a video, as its rows are counted: some kernels take few rows alone, some many.
_SIDES = (8, 16)
#: Sizes that most kernels have; where a slot has none of them, its smallest is asked for.
_HEAD_DIMS = (64, 128)
_PAGE_SIZES = (16, 64, 128, 256)
_NOTHING = "no slot of it claims both a structure and a dtype: it takes no call"


def usable(backend: Backend, machine: Machine) -> tuple[str, tuple[str, ...]]:
    """A word ("usable", "missing package", "not usable") and the reasons.

    Not usable is what takes none of the calls; the reasons are those that all of them met, which the machine gives and
    not the call. So what `info` says of a backend is what `explain` says of it.
    """
    refused: list[tuple[Request, tuple[str, ...]]] = []
    for request in plain_requests(backend, machine):
        (decision,) = resolve(request, machine, (backend,))
        if isinstance(decision, Accepted):
            return "usable", ()
        if decision.missing_package:
            return "missing package", decision.reasons
        refused.append((request, decision.reasons))
    if not refused:
        return "not usable", (_NOTHING,)
    first, reasons = refused[0]
    shared = tuple(reason for reason in reasons if all(reason in others for _, others in refused))
    return "not usable", shared or tuple(f"{reason} (asked for {first})" for reason in reasons)


def plain_requests(backend: Backend, machine: Machine) -> Iterator[Request]:
    """Calls without switches, one for each structure, dtype and common size that its slots claim."""
    asked = dict.fromkeys(one for slot in backend.slots for one in _claimed(slot.features))
    return (request_of(one, f"{machine.device_type}:{machine.index}")[0] for one in asked)


def _claimed(features: Features) -> Iterator[Asked]:
    methods = ([None] if features.exact else []) + sorted(features.quant)
    dims = _some(features.head_dims, _HEAD_DIMS)
    for side, kind, dtype, dim, quant in product(
        _SIDES, sorted(features.kinds), sorted(features.dtypes), dims, methods
    ):
        rows = side**3
        q = (rows, _HEADS, dim) if kind == "packed" else (1, rows, _HEADS, dim)
        plain = Asked(q, dtype=dtype, structure=kind, quant=quant)
        if kind == "prefix_kv":  # what key padding is where all rows keep the same keys, as one row does
            yield replace(plain, structure="key_padding")
        elif kind == "key_padding":
            yield replace(plain, q=(2, *q[1:]))
        elif kind == "video_tiles":
            yield replace(plain, grid=(side, side, side))
        elif kind == "paged":
            for page in _some(features.page_sizes, _PAGE_SIZES):
                yield replace(plain, k=(-(-rows // page), page, _HEADS, dim))
        else:
            yield plain


def _some(limit: Collection[int] | None, common: tuple[int, ...]) -> tuple[int, ...]:
    """Those of the common sizes that are within the limit, or its smallest."""
    found = tuple(size for size in common if limit is None or size in limit)
    return found or tuple(sorted(limit or ())[:1])
