"""Packed: documents side by side in one row of tokens, none seeing another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure
from polyattn.structures.host_data import (
    boundaries,
    host_integers,
    integer_tensor,
    lengths_from_boundaries,
    lengths_of,
    on_host,
    pairs_of,
)
from polyattn.structures.spans import Pairs, check_spans

Lengths = tuple[int, ...]


class Packed(Structure):
    """Block-diagonal documents; q is [T,H,D] or [1,T,H,D]. Rows past the last boundary return 0.

    Causal and windows are aligned per document. `spans` gives each document's full spans, in the document's own key
    positions. With `capacity=(documents, max_q[, max_k])` only capacities are routing facts, and `update_` writes new
    lengths in place (graph replay).

    >>> import torch, polyattn as pa
    >>> q = torch.zeros(6, 1, 8)
    >>> v = torch.tensor([1.0, 3, 5, 7, 8, 9]).reshape(6, 1, 1)
    >>> pa.attention(q, q, v, structure=pa.Packed.from_lengths([2, 1, 3])).flatten().tolist()
    [2.0, 2.0, 5.0, 8.0, 8.0, 8.0]
    """

    kind: ClassVar[str] = "packed"
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    lengths_q: Lengths | None
    lengths_k: Lengths | None
    spans: Pairs | None
    totals: tuple[int, int] | None
    capacity: bool

    def __init__(
        self,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,
        max_k: int,
        lengths_q: Lengths | None,
        lengths_k: Lengths | None,
        *,
        spans: Any = None,
        totals: tuple[int, int] | None = None,
        capacity: bool = False,
    ) -> None:
        documents = cu_q.shape[0] - 1
        if cu_k.shape[0] - 1 != documents:
            raise ValueError(f"cu_seqlens: {documents} documents of queries but {cu_k.shape[0] - 1} of keys")
        rows = None if spans is None else pairs_of("spans", spans)
        if rows is not None:
            if lengths_k is None or lengths_q is None:
                raise ValueError("spans: documents with spans need their lengths on the host (from_lengths)")
            check_spans(rows, lengths_k)
        facts = StructureFacts(
            host=lengths_q is not None,
            documents=documents,
            spans=rows is not None and any(rows),
            capacity=capacity,
            same_lengths=cu_q is cu_k,
        )
        self._freeze(
            cu_q=cu_q, cu_k=cu_k, max_q=max_q, max_k=max_k, lengths_q=lengths_q, lengths_k=lengths_k, spans=rows,
            totals=totals, capacity=capacity, facts=facts,
        )  # fmt: skip

    @classmethod
    def from_lengths(cls, q: Any, k: Any = None, *, spans: Any = None, capacity: tuple[int, ...] | None = None) -> Packed:
        """Documents of `q` query rows and `k` key rows each (`k` defaults to `q`), known on the host."""
        for name, data in (("q", q), ("k", k)):
            if isinstance(data, torch.Tensor) and not on_host(data):
                raise ValueError(
                    f"{name}: lengths on {data.device} would have to be read back; give host lengths, or boundaries with "
                    "from_cu_seqlens(cu_q, max_q=...)"
                )
        lengths_q = lengths_of("q", q)
        lengths_k = lengths_q if k is None else lengths_of("k", k)
        if len(lengths_k) != len(lengths_q):
            raise ValueError(f"k: {len(lengths_q)} documents of queries but {len(lengths_k)} of keys")
        return cls._on_host(lengths_q, lengths_k, spans=spans, capacity=capacity)

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_q: Any,
        cu_k: Any = None,
        max_q: int | None = None,
        max_k: int | None = None,
        *,
        spans: Any = None,
        capacity: tuple[int, ...] | None = None,
        check: bool = False,
    ) -> Packed:
        """From cumulative boundaries [documents + 1], int32 or int64, starting at 0.

        Boundaries on a device are trusted and need `max_q` (and `max_k` with `cu_k`); `check=True` reads them once.
        """
        tensors = [data for data in (cu_q, cu_k) if isinstance(data, torch.Tensor) and not on_host(data)]
        if not tensors or check:
            lengths_q = lengths_from_boundaries("cu_seqlens (q)", cu_q)
            lengths_k = lengths_q if cu_k is None else lengths_from_boundaries("cu_seqlens (k)", cu_k)
            for name, limit, lengths in (("max_q", max_q, lengths_q), ("max_k", max_k, lengths_k)):
                if limit is not None and lengths and limit < max(lengths):
                    raise ValueError(f"{name}: {limit} is less than the longest document, {max(lengths)} (cu_seqlens)")
            return cls._on_host(lengths_q, lengths_k, spans=spans, capacity=capacity)
        if cu_k is not None and len(tensors) != 2:
            raise ValueError("cu_seqlens: give cu_q and cu_k both on the host or both on the device")
        if max_q is None or (cu_k is not None and max_k is None):
            raise ValueError("max_q: boundaries on a device need max_q (and max_k with cu_k), which are never read back")
        if capacity is not None:
            raise ValueError("capacity: build from host lengths (from_lengths(..., capacity=)); update_ moves them over")
        q = integer_tensor("cu_seqlens (q)", tensors[0], 1).to(torch.int32)
        k = q if cu_k is None else integer_tensor("cu_seqlens (k)", tensors[1], 1).to(torch.int32)
        return cls(q, k, max_q, max_q if max_k is None else max_k, None, None, spans=spans)

    @classmethod
    def from_position_ids(cls, position_ids: Any) -> Packed:
        """A document starts wherever an id is not its predecessor plus one; ids [T] or [1,T], on the host."""
        if isinstance(position_ids, torch.Tensor):
            if not on_host(position_ids):
                raise ValueError(f"position_ids: a tensor on {position_ids.device} would have to be read back; give it on the host")
            if position_ids.dim() == 2 and position_ids.shape[0] == 1:
                position_ids = position_ids[0]
        ids = host_integers("position_ids", position_ids)
        starts = [0] if ids else []
        starts += [index for index in range(1, len(ids)) if ids[index] != ids[index - 1] + 1]
        lengths = tuple(end - start for start, end in zip(starts, [*starts[1:], len(ids)], strict=True))
        return cls._on_host(lengths, lengths)

    @classmethod
    def from_nested(cls, nested: torch.Tensor, *, max_q: int | None = None) -> Packed:
        """From a jagged nested tensor [N, ragged, ...]; the packed rows are its `.values()`."""
        if not nested.is_nested or nested.layout != torch.jagged:
            raise TypeError(f"nested: a jagged nested tensor is needed, got {type(nested).__name__} of {nested.layout}")
        return cls.from_cu_seqlens(nested.offsets(), max_q=max_q)

    @classmethod
    def real_and_pad(cls, real: int, total: int, k_real: int | None = None, k_total: int | None = None) -> Packed:
        """One document of `real` rows in tensors of `total` rows; the rows after it return 0."""
        k_real = real if k_real is None else k_real
        k_total = total if k_total is None else k_total
        for name, part, whole in (("real", real, total), ("k_real", k_real, k_total)):
            (part_, whole_) = host_integers(name, (part, whole))
            if not 0 <= part_ <= whole_:
                raise ValueError(f"{name}: 0 <= {name} <= total is needed, got {part} of {whole}")
        same = (real, total) == (k_real, k_total)
        lengths_q: Lengths = (real,)
        return cls._on_host(lengths_q, lengths_q if same else (k_real,), totals=(total, k_total))

    @classmethod
    def _on_host(
        cls,
        lengths_q: Lengths,
        lengths_k: Lengths,
        *,
        spans: Any = None,
        capacity: tuple[int, ...] | None = None,
        totals: tuple[int, int] | None = None,
    ) -> Packed:
        max_q, max_k = max(lengths_q, default=0), max(lengths_k, default=0)
        if capacity is not None:
            limits = host_integers("capacity", capacity)
            if len(limits) not in (2, 3):
                raise ValueError(f"capacity: (documents, max_q) or (documents, max_q, max_k) is needed, got {capacity}")
            lengths_q, lengths_k = _within_capacity(lengths_q, lengths_k, limits)
            max_q, max_k = limits[1], limits[-1]
        same = lengths_q is lengths_k and capacity is None
        cu_q = boundaries(lengths_q)
        cu_k = cu_q if same else boundaries(lengths_k)
        return cls(cu_q, cu_k, max_q, max_k, lengths_q, lengths_k, spans=spans, totals=totals, capacity=capacity is not None)

    def update_(self, q: Any, k: Any = None) -> None:
        """New lengths in place, on every device this structure was sent to; needs `capacity=` and no spans."""
        if not self.capacity or self.spans is not None:
            raise ValueError("update_: only a Packed built with capacity= and without spans can be updated")
        limits = (self.cu_q.shape[0] - 1, self.max_q, self.max_k)
        lengths_q = lengths_of("q", q)
        lengths_q, lengths_k = _within_capacity(lengths_q, lengths_q if k is None else lengths_of("k", k), limits)
        object.__setattr__(self, "lengths_q", lengths_q)
        object.__setattr__(self, "lengths_k", lengths_k)
        self.cu_q.copy_(boundaries(lengths_q))
        self.cu_k.copy_(boundaries(lengths_k))
        self._bound.clear()  # the next call checks the new totals against its tensors
        for meta in self._prepared.values():
            meta.write_(self.cu_q, self.cu_k, lengths_q, lengths_k)

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        for axis, (name, shape, lengths) in enumerate((("q", q_shape, self.lengths_q), ("k", k_shape, self.lengths_k))):
            if lengths is None:
                continue
            if sum(lengths) > shape[0]:
                raise ValueError(f"cu_seqlens ({name}): documents hold {sum(lengths)} rows, but {name} has T={shape[0]}")
            if self.totals is not None and self.totals[axis] != shape[0]:
                raise ValueError(f"structure: real_and_pad was told {self.totals[axis]} rows, but {name} has T={shape[0]}")

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> PackedMeta:
        # capacity structures rewrite their boundaries, so that a device's copy must not be the structure's own tensor
        cu_q = self.cu_q.to(device, copy=self.capacity)
        cu_k = cu_q if self.cu_k is self.cu_q else self.cu_k.to(device, copy=self.capacity)
        return PackedMeta(cu_q, cu_k, self.max_q, self.max_k, self.lengths_q, self.lengths_k, self.spans)

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.cu_q, self.cu_k)

    def anchor_ints(self) -> tuple[int, ...]:
        return (self.max_q, self.max_k)

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Packed:
        cu_q, cu_k = tensors
        return cls.from_cu_seqlens(cu_q, None if cu_k is cu_q else cu_k, ints[0], ints[1])

    def __repr__(self) -> str:
        inside = f"{self.facts.documents} documents" if self.lengths_q is None else f"lengths {list(self.lengths_q[:8])}"
        return f"Packed({inside})"


@dataclass
class PackedMeta:
    """Packed documents on one device.

    cu_q, cu_k    int32 [documents + 1]; the same tensor where queries and keys share boundaries
    max_q, max_k  the longest document (or the capacity)
    lengths_q/_k  per document, where the host knows them
    spans         per document, in its own key positions
    """

    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    lengths_q: Lengths | None
    lengths_k: Lengths | None
    spans: Pairs | None

    def write_(self, cu_q: torch.Tensor, cu_k: torch.Tensor, lengths_q: Lengths, lengths_k: Lengths) -> None:
        """Take new lengths in place (`Packed.update_`)."""
        self.cu_q.copy_(cu_q)
        self.cu_k.copy_(cu_k)
        self.lengths_q, self.lengths_k = lengths_q, lengths_k


def _within_capacity(q: Lengths, k: Lengths, limits: tuple[int, ...]) -> tuple[Lengths, Lengths]:
    for name, lengths, longest in (("q", q, limits[1]), ("k", k, limits[-1])):
        if len(lengths) > limits[0] or max(lengths, default=0) > longest:
            raise ValueError(
                f"{name}: {len(lengths)} documents of at most {max(lengths, default=0)} rows exceed the capacity of "
                f"{limits[0]} documents of {longest} rows"
            )
    if len(q) != len(k):
        raise ValueError(f"k: {len(q)} documents of queries but {len(k)} of keys")
    spare = (0,) * (limits[0] - len(q))
    return q + spare, k + spare
