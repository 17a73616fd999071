"""The capability matrix: what the slots of a platform's backends state, as data, as sections and as Markdown."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from polyattn.cli.installed import installed
from polyattn.cli.report import Section
from polyattn.discovery import backends_of
from polyattn.discovery.loading import cause
from polyattn.discovery.scan import BROKEN
from polyattn.vendor import Backend, Capability, Slot, capabilities_of

_LIMITS = ("dtypes", "head_dims", "page_sizes", "documents")

#: {"platform", "backends": {name: {"capabilities": [...], "limits": {...}}}}
Matrix = dict[str, Any]


def matrix(platform: str, backends: Iterable[Backend]) -> Matrix:
    """What each backend can do: the union over its slots; JSON-ready."""
    return {
        "platform": platform,
        "backends": {
            backend.name: {"capabilities": _capabilities(backend), "limits": _limits(backend)} for backend in backends
        },
    }


def installed_matrices() -> tuple[list[Matrix], list[str]]:
    """The matrix of every installed platform, its devices present or not; and why one is missing, a line each."""
    matrices, errors = [], []
    for platform in installed():
        try:
            matrices.append(matrix(platform.name, backends_of(platform)))
        except BROKEN as error:
            errors.append(f"no capabilities of {platform.name}: {cause(error)}")
    return matrices, errors


def sections(matrices: Iterable[Matrix]) -> list[Section]:
    """One table a platform: capabilities and limits by backend."""
    return [
        Section(f"capabilities of {facts['platform']}", _rows(facts, "-"), ("", *facts["backends"]))
        for facts in matrices
        if facts["backends"]
    ]


def markdown(matrices: Iterable[Matrix]) -> str:
    """One Markdown table a platform, for README and docs."""
    tables = []
    for facts in matrices:
        if not facts["backends"]:
            continue
        header = (facts["platform"], *facts["backends"])
        lines = [header, ("---",) * len(header), *_rows(facts, "")]
        tables.append("\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n")
    return "\n".join(tables)


def _rows(facts: Matrix, absent: str) -> list[tuple[str, ...]]:
    backends = facts["backends"].values()
    flags = [
        (flag, *("yes" if flag in backend["capabilities"] else absent for backend in backends))
        for flag in Capability.__members__
    ]
    limits = [(name.replace("_", " "), *(backend["limits"][name] for backend in backends)) for name in _LIMITS]
    return flags + limits


def _capabilities(backend: Backend) -> list[str]:
    has = Capability(0)
    for slot in backend.slots:
        has |= capabilities_of(slot.features)
    return [name for name, flag in Capability.__members__.items() if flag in has]


def _limits(backend: Backend) -> dict[str, str]:
    slots = backend.slots
    # a slot that always quantises takes more dtypes than the backend computes in; one that has no other states its own
    exact = [slot for slot in slots if slot.features.exact] or slots
    return {
        "dtypes": ", ".join(sorted({name for slot in exact for name in slot.features.dtypes})) or "none",
        "head_dims": _union([slot.features.head_dims for slot in slots]),
        "page_sizes": _union([slot.features.page_sizes for slot in _taking("paged", slots)]),
        "documents": _most([slot.features.max_documents for slot in _taking("packed", slots)]),
    }


def _taking(kind: str, slots: Sequence[Slot]) -> list[Slot]:
    return [slot for slot in slots if kind in slot.features.kinds]


def _union(limits: Sequence[Collection[int] | None]) -> str:
    if not limits:
        return "-"
    if any(limit is None for limit in limits):
        return "any"
    values = sorted({value for limit in limits for value in limit or ()})
    return ", ".join(_runs(values)) or "none"


def _runs(values: Sequence[int]) -> Iterator[str]:
    """Values in words: five or more that follow each other by one step are a range."""
    at = 0
    while at < len(values):
        end = at + 1
        while end + 1 < len(values) and values[end + 1] - values[end] == values[at + 1] - values[at]:
            end += 1
        if end - at >= 4:
            yield f"{values[at]} to {values[end]} in steps of {values[end] - values[end - 1]}"
            at = end + 1
        else:
            yield str(values[at])
            at += 1


def _most(limits: Sequence[int | None]) -> str:
    if not limits:
        return "-"
    return "any" if any(limit is None for limit in limits) else str(max(limit for limit in limits if limit is not None))
