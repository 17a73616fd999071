"""What the ranks of a call must agree on before they communicate, field by field."""

from __future__ import annotations

from ctypes import string_at
from dataclasses import fields
from hashlib import sha256
from typing import Any

from polyattn.distributed.local import STATED
from polyattn.distributed.parallel import SequenceParallel
from polyattn.distributed.rows import Split
from polyattn.distributed.stated_rows import structure_rows
from polyattn.structures import Packed, Structure
from polyattn.structures.base import keep
from polyattn.structures.host_data import on_host

#: A structure has one digest; the bound only bounds the cache it lies in.
_LIMIT = 256
#: Not told: ranks' own numbers for a group, and what is told field by field.
_LOCAL = ("group", "arguments")


def signature_of(
    parallel: SequenceParallel, splits: tuple[Split, Split], stated: dict[str, Any], structure: Structure | None
) -> dict[str, Any]:
    """Degrees, rows of every rank, what was stated, and the structure."""
    facts, *more = stated["arguments"]
    arguments = {one.name: getattr(facts, one.name) for one in fields(facts)}
    each = {**stated, **arguments, **dict(zip(STATED, more, strict=True)), "device": stated["device"].type}
    named = {name: str(value) for name, value in each.items() if name not in _LOCAL}
    given = zip(
        "qk", splits, structure_rows(structure), (parallel.rows, parallel.kv_rows or parallel.rows), strict=True
    )
    rows = {f"rows of {side}": _told(split, told is None and said is None) for side, split, told, said in given}
    return {"degrees": parallel.degrees, **rows, **named, "structure": digest_of(structure)}


def digest_of(structure: Structure | None) -> str:
    """A structure's kind, facts, and the content that the host knows: ranks that skip keys must skip the same."""
    if structure is None:
        return "dense"
    found = structure.parts.get("digest")
    if found is None:
        found = _digest(structure)
        keep(structure.parts, _LIMIT, "digest", found)
    return str(found)


def _digest(structure: Structure) -> str:
    content = sha256(repr((structure.facts, structure.anchor_ints(), structure.anchor_detail())).encode())
    fixed = not (isinstance(structure, Packed) and structure.capacity is not None)
    if isinstance(structure, Packed):
        content.update(repr(structure.totals).encode())
    for tensor in structure.anchors():
        content.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
        if fixed and on_host(tensor):
            kept = tensor.detach().contiguous()
            content.update(string_at(kept.data_ptr(), kept.nbytes))  # torch may be installed without numpy
    return f"{structure.kind} {content.hexdigest()[:16]}"


def _told(split: Split, assumed: bool) -> str:
    """Rows that every rank holds before, the rows of each rank, rows that every rank holds after."""
    shares = f"{split.shards[0]} on each rank" if len(set(split.shards)) == 1 else "/".join(map(str, split.shards))
    asked = " (nobody stated them: SequenceParallel(rows=, kv_rows=) does)" if assumed else ""
    return f"{split.lead} + {shares} + {split.trail}{asked}"
