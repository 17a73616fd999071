"""The order file: which backends were fastest here, by structure, dtype and size; written by `bench`, read by routing.

    {"format": "polyattn-order-1", "platform": "cuda", "arch": "sm_90", "device": ..., "versions": {...}, "date": ...,
     "orders": [{"structure": "dense", "dtype": "bfloat16", "head_dim": 128, "page_size": null, "size": 29,
                 "order": ["fa3", "cudnn"], "milliseconds": {"fa3": 0.402, "cudnn": 0.445}}]}

`size` is the rounded log2 of the number of scores, query heads x query rows x key rows. Forward passes are what was
measured. Standard library only.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyattn.door.platform import Machine
from polyattn.door.request import Request

FORMAT = "polyattn-order-1"
#: How far, in log2 of the scores, a measurement speaks for other sizes: four times fewer or more.
REACH = 2


@dataclass(frozen=True)
class MeasuredOrder:
    """Backends, fastest first, for requests of one structure, dtype, head_dim and page size around one size."""

    structure: str
    dtype: str
    head_dim: int
    page_size: int | None
    size: int
    order: tuple[str, ...]
    milliseconds: Mapping[str, float] = field(default_factory=dict)

    @property
    def covers(self) -> tuple[str, str, int, int | None]:
        """What a request must share with it, beside the size: structure, dtype, head_dim and page size."""
        return self.structure, self.dtype, self.head_dim, self.page_size


@dataclass(frozen=True)
class Orders:
    """All that was measured on one kind of device."""

    platform: str
    arch: str
    orders: tuple[MeasuredOrder, ...]
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""

    def names(self, request: Request, machine: Machine) -> tuple[str, ...]:
        """Backend names, fastest first, from the measurement nearest in size, at most `REACH` away.

        Nothing for another platform or architecture, where gradients are needed, or where this structure, dtype,
        head_dim and page size were not measured around this size: the platform's own order decides then.
        """
        if (machine.platform, machine.arch) != (self.platform, self.arch) or request.grad:
            return ()
        size, page = size_of(request), request.structure_facts.page_size
        asked = request.structure_kind, request.dtype, request.head_dim, page
        near = [entry for entry in self.orders if entry.covers == asked and abs(entry.size - size) <= REACH]
        return min(near, key=lambda entry: abs(entry.size - size)).order if near else ()


def size_of(request: Request) -> int:
    """The rounded log2 of the scores that the request's shapes allow; at least 0.

    >>> from polyattn.vendor import Request, TensorFacts
    >>> facts = TensorFacts.contiguous((1, 4096, 32, 128), "bfloat16")
    >>> size_of(Request(facts, facts, facts))
    29
    """
    rows, documents = request.q.shape[0], request.structure_facts.documents or 1
    if request.structure_kind == "packed":
        scores = rows * request.k.shape[0] // documents
    elif request.structure_kind == "paged":
        queries = rows if len(request.q.shape) == 3 else rows * request.q.shape[1]
        scores = queries * request.k.shape[0] * request.k.shape[1] // documents
    else:
        scores = rows * request.q.shape[1] * request.k.shape[1]
    return round(math.log2(max(1, scores * request.num_heads)))


def write_order(path: Path, orders: Orders) -> None:
    """Write the file."""
    facts = {
        "platform": orders.platform,
        "arch": orders.arch,
        "device": orders.device,
        "versions": dict(orders.versions),
        "date": orders.date,
    }
    entries = [{**vars(entry), "milliseconds": dict(entry.milliseconds)} for entry in orders.orders]
    path.write_text(json.dumps({"format": FORMAT, **facts, "orders": entries}, indent=2) + "\n", encoding="utf-8")


def read_order(path: Path) -> Orders:
    """Read the file; ValueError with the path and what is wrong, OSError where it cannot be read."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not JSON ({error})") from error
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        given = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"{path}: format {FORMAT!r} is needed, got {given!r}; polyattn bench --write-order makes one")
    try:
        return Orders(
            platform=_text(data, "platform"),
            arch=_text(data, "arch"),
            orders=_entries(data["orders"]),
            device=str(data.get("device", "")),
            versions=data.get("versions", {}),
            date=str(data.get("date", "")),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error


def _entries(data: Any) -> tuple[MeasuredOrder, ...]:
    if not isinstance(data, list):
        raise TypeError(f"orders: a list is needed, got {type(data).__name__}")
    return tuple(map(_entry, data))


def _entry(data: Mapping[str, Any]) -> MeasuredOrder:
    names = data["order"]
    if not isinstance(names, Sequence) or isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"order: a list of backend names is needed, got {names!r}")
    return MeasuredOrder(
        structure=_text(data, "structure"),
        dtype=_text(data, "dtype"),
        head_dim=int(data["head_dim"]),
        page_size=None if data["page_size"] is None else int(data["page_size"]),
        size=int(data["size"]),
        order=tuple(names),
        milliseconds=data.get("milliseconds", {}),
    )


def _text(data: Mapping[str, Any], name: str) -> str:
    if not isinstance(data[name], str):
        raise TypeError(f"{name}: a text is needed, got {data[name]!r}")
    return str(data[name])
