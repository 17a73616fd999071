"""Packed: documents side by side in one row of tokens, none seeing another."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, ClassVar

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure, deriving
from polyattn.structures.capacity import Capacity, capacity_of, fitted
from polyattn.structures.host_data import (
    boundaries,
    integer,
    integer_tensor,
    lengths_from_boundaries,
    lengths_from_positions,
    lengths_of,
    on_host,
)
from polyattn.structures.intervals import Intervals, check_ends, intervals_of, rows_of, table_of
from polyattn.structures.lasting import lasting, normal
from polyattn.structures.packed_meta import PackedMeta
from polyattn.structures.transfer import send

Lengths = tuple[int, ...]


class Packed(Structure):
    """Block-diagonal documents; q is [T,H,D] or [1,T,H,D]. Rows past the last boundary return 0.

    Built by `from_lengths`, `from_cu_seqlens`, `from_position_ids`, `from_nested` or `real_and_pad`. Causal and
    windows are aligned per document. `spans` gives each document's full spans, in the document's own key positions,
    and makes it causal outside them.

    With `capacity=(documents, max_q[, max_k])` only capacities are routing facts, and `update_` writes new lengths in
    place (graph replay). The rows of all documents must then fit the tensors that the graph was captured with.

    >>> import torch, polyattn as pa
    >>> q = torch.zeros(6, 1, 8)
    >>> v = torch.tensor([1.0, 3, 5, 7, 8, 9]).reshape(6, 1, 1)
    >>> pa.attention(q, q, v.expand(6, 1, 8), structure=pa.Packed.from_lengths([2, 1, 3]))[:, 0, 0].tolist()
    [2.0, 2.0, 5.0, 8.0, 8.0, 8.0]
    """

    kind: ClassVar[str] = "packed"
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    lengths_q: Lengths | None
    lengths_k: Lengths | None
    spans: tuple[Intervals, ...] | None
    spans_table: torch.Tensor | None
    totals: tuple[int, int] | None
    capacity: Capacity | None

    def __init__(self, *given: Any, **named: Any) -> None:
        raise TypeError(
            "Packed is built by from_lengths, from_cu_seqlens, from_position_ids, from_nested or real_and_pad"
        )

    @classmethod
    def _build(cls, cu_q: torch.Tensor, cu_k: torch.Tensor, **fields: Any) -> Packed:
        known = {"lengths_q": None, "lengths_k": None, "spans": None, "totals": None, "capacity": None, **fields}
        facts = StructureFacts(
            host=known["lengths_q"] is not None,
            documents=cu_q.shape[0] - 1,
            spans=known["spans"] is not None,
            capacity=known["capacity"] is not None,
            same_lengths=cu_q is cu_k,
        )
        structure = cls.__new__(cls)
        structure._freeze(cu_q=cu_q, cu_k=cu_k, facts=facts, spans_table=table_of(known["spans"]), **known)
        return structure

    @classmethod
    def _on_host(
        cls,
        lengths_q: Lengths,
        lengths_k: Lengths | None,
        *,
        spans: Any = None,
        capacity: Any = None,
        totals: tuple[int, int] | None = None,
    ) -> Packed:
        """`lengths_k` None: keys share the queries' boundaries."""
        same = lengths_k is None
        lengths_k = lengths_q if lengths_k is None else lengths_k
        if len(lengths_k) != len(lengths_q):
            raise ValueError(f"k: {len(lengths_q)} documents of queries but {len(lengths_k)} of keys")
        if spans is not None:
            if capacity is not None:
                raise ValueError("capacity: it does not combine with spans, which belong to fixed lengths")
            spans = intervals_of("spans", spans)
            check_ends("spans", spans, lengths_k)
        limits = None
        if capacity is not None:
            limits = capacity_of(capacity)
            same = same and limits.max_q == limits.max_k
            lengths_q, lengths_k = fitted(lengths_q, lengths_k, limits)
        cu_q = boundaries(lengths_q)
        return cls._build(
            cu_q,
            cu_q if same else boundaries(lengths_k),
            max_q=max(lengths_q, default=0) if limits is None else limits.max_q,
            max_k=max(lengths_k, default=0) if limits is None else limits.max_k,
            lengths_q=lengths_q,
            lengths_k=lengths_k,
            spans=spans,
            totals=totals,
            capacity=limits,
        )

    @classmethod
    def from_lengths(
        cls, q: Any, k: Any = None, *, spans: Any = None, capacity: Any = None, check: bool = False
    ) -> Packed:
        """Documents of `q` query rows and `k` key rows each (`k` defaults to `q`), known on the host.

        Lengths on a device would have to be read back, which only `check=True` permits.
        """
        for name, data in (("q", q), ("k", k)):
            if not on_host(data) and not check:
                raise ValueError(
                    f"{name}: lengths on {data.device} would have to be read back; give host lengths, check=True, or "
                    "boundaries with from_cu_seqlens(cu_q, max_q=...)"
                )
        return cls._on_host(
            lengths_of("q", q), None if k is None else lengths_of("k", k), spans=spans, capacity=capacity
        )

    @classmethod
    def from_cu_seqlens(
        cls,
        cu_q: Any,
        cu_k: Any = None,
        max_q: int | None = None,
        max_k: int | None = None,
        *,
        spans: Any = None,
        capacity: Any = None,
        check: bool = False,
    ) -> Packed:
        """From cumulative boundaries [documents + 1], int32 or int64, starting at 0.

        Boundaries on a device are trusted and need `max_q` (and `max_k` with `cu_k`), at least the longest document;
        `check=True` reads them once. Contiguous int32 ones are referenced, and kernels read what they then hold.
        """
        longest = {name: None if n is None else integer(name, n) for name, n in (("max_q", max_q), ("max_k", max_k))}
        device = [data for data in (cu_q, cu_k) if not on_host(data)]
        if check or not device:
            lengths_q = lengths_from_boundaries("cu_q (cu_seqlens)", cu_q)
            lengths_k = None if cu_k is None else lengths_from_boundaries("cu_k (cu_seqlens)", cu_k)
            for (name, limit), lengths in zip(longest.items(), (lengths_q, lengths_k or lengths_q), strict=True):
                if limit is not None and limit < max(lengths, default=0):
                    raise ValueError(f"{name}: {limit} is less than the longest document of cu_seqlens, {max(lengths)}")
            return cls._on_host(lengths_q, lengths_k, spans=spans, capacity=capacity)
        if cu_k is not None and len(device) != 2:
            raise ValueError("cu_q, cu_k (cu_seqlens): both on the host or both on a device are needed (or check=True)")
        if max_q is None or (cu_k is not None and max_k is None):
            raise ValueError(
                "max_q: boundaries on a device need max_q (and max_k with cu_k), which are never read back"
            )
        for name, data in (("spans", spans), ("capacity", capacity)):
            if data is not None:
                raise ValueError(f"{name}: it needs lengths on the host (from_lengths, or check=True)")
        q = _device_boundaries("cu_q (cu_seqlens)", cu_q)
        k = q if cu_k is None or cu_k is cu_q else _device_boundaries("cu_k (cu_seqlens)", cu_k)
        if k.shape != q.shape:
            raise ValueError(f"cu_k: {q.shape[0] - 1} documents of queries but {k.shape[0] - 1} of keys")
        return cls._build(q, k, max_q=max_q, max_k=max_q if max_k is None else max_k)

    @classmethod
    def from_position_ids(cls, position_ids: Any, *, check: bool = False) -> Packed:
        """A document starts wherever an id is not its predecessor plus one; ids [T] or [1,T], on the host."""
        if not on_host(position_ids) and not check:
            raise ValueError(
                f"position_ids: a tensor on {position_ids.device} would have to be read back; "
                "give it on the host, or check=True"
            )
        return cls._on_host(lengths_from_positions("position_ids", position_ids), None)

    @classmethod
    def from_nested(cls, nested: Any, *, max_q: int | None = None) -> Packed:
        """From a contiguous jagged nested tensor [N, ragged, ...]; the packed rows are its `.values()`.

        Offsets on a device need `max_q`, the longest document.
        """
        if not isinstance(nested, torch.Tensor) or not nested.is_nested or nested.layout != torch.jagged:
            given = nested.layout if isinstance(nested, torch.Tensor) else type(nested).__name__
            raise TypeError(f"nested: a jagged nested tensor [N, ragged, ...] is needed, got {given}")
        if isinstance(nested.shape[1], int) or nested.lengths() is not None:
            raise ValueError(
                "nested: documents must follow each other along axis 1; call .contiguous() on [N, ragged, ...]"
            )
        return cls.from_cu_seqlens(nested.offsets(), max_q=max_q)

    @classmethod
    def real_and_pad(cls, real: int, total: int, k_real: int | None = None, k_total: int | None = None) -> Packed:
        """One document of `real` rows in tensors of `total` rows; the rows after it return 0."""
        rows = {
            "real": (real, total),
            "k_real": (real if k_real is None else k_real, total if k_total is None else k_total),
        }
        for name, (part, whole) in rows.items():
            if integer(name, part) > integer("total", whole):
                raise ValueError(f"{name}: at most the {whole} rows of the tensor are needed, got {part}")
        if rows["real"] == rows["k_real"]:
            return cls._on_host((int(real),), None, totals=(total, total))
        return cls._on_host((int(real),), (int(rows["k_real"][0]),), totals=(total, rows["k_real"][1]))

    @lasting
    def update_(self, q: Any, k: Any = None) -> None:
        """New lengths in place, on every device this structure was sent to; needs `capacity=`.

        Whether `k` is given is fixed by how the structure was built. Nothing changes where this raises.
        """
        if self.capacity is None:
            raise ValueError("update_: only a Packed built with capacity= can be updated")
        if self.facts.same_lengths and k is not None:
            raise ValueError(
                "k: this Packed was built with one set of lengths; build it with k= (or a max_k) to update both"
            )
        lengths_q = lengths_of("q", q)
        lengths_k = lengths_q if k is None else lengths_of("k", k)
        if len(lengths_k) != len(lengths_q):
            raise ValueError(f"k: {len(lengths_q)} documents of queries but {len(lengths_k)} of keys")
        lengths_q, lengths_k = fitted(lengths_q, lengths_k, self.capacity)
        with deriving:
            cu_q, cu_k = boundaries(lengths_q), boundaries(lengths_k)
            for holder in (self, *self._prepared.values()):
                holder.cu_q.copy_(cu_q)
                if holder.cu_k is not holder.cu_q:
                    holder.cu_k.copy_(cu_k)
            object.__setattr__(self, "lengths_q", lengths_q)
            object.__setattr__(self, "lengths_k", lengths_k)
            self._bound.clear()  # the next call checks the new totals against its tensors
            for meta in self._prepared.values():
                meta.lengths_q, meta.lengths_k = lengths_q, lengths_k
            self._settle_versions()

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        for axis, (name, shape, lengths) in enumerate((("q", q_shape, self.lengths_q), ("k", k_shape, self.lengths_k))):
            if lengths is None:
                continue
            if self.totals is not None and self.totals[axis] != shape[0]:
                raise ValueError(
                    f"structure: real_and_pad was told {self.totals[axis]} rows, but {name} has T={shape[0]}"
                )
            if sum(lengths) > shape[0]:
                raise ValueError(
                    f"structure: the documents (cu_seqlens) hold {sum(lengths)} rows of {name}, "
                    f"but {name} has T={shape[0]}"
                )

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> PackedMeta:
        cu_q = self._boundaries_on(device, self.cu_q)
        cu_k = cu_q if self.cu_k is self.cu_q else self._boundaries_on(device, self.cu_k)
        fixed = self.capacity is None
        return PackedMeta(cu_q, cu_k, self.max_q, self.max_k, self.lengths_q, self.lengths_k, self.spans, fixed)

    def _boundaries_on(self, device: torch.device, boundary: torch.Tensor) -> torch.Tensor:
        # update_ rewrites both, so that a device's copy must not be the structure's own tensor
        return send(boundary, device) if self.capacity is None else send(boundary.clone(), device)

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.cu_q, self.cu_k) if self.spans_table is None else (self.cu_q, self.cu_k, self.spans_table)

    def anchor_ints(self) -> tuple[int, ...]:
        return (self.max_q, self.max_k)

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> Packed:
        cu_q, cu_k = tensors[:2]
        spans = rows_of(tensors[2], cu_q.shape[0] - 1) if len(tensors) == 3 else None
        shared = cu_k is cu_q or detail == "shared"
        return cls.from_cu_seqlens(cu_q, None if shared else cu_k, ints[0], ints[1], spans=spans)

    def anchor_detail(self) -> str:
        return "shared" if self.cu_k is self.cu_q else ""

    def stale(self) -> bool:
        return self.facts.host and super().stale()  # nothing is derived from boundaries that only a device holds

    def __copy__(self) -> Packed:
        return self.__deepcopy__({})

    @lasting
    def __deepcopy__(self, memo: dict[int, Any]) -> Packed:
        if self.capacity is None:
            return self
        structure = type(self).__new__(type(self))
        structure.__setstate__(deepcopy(self.__getstate__(), memo))
        return structure

    def __repr__(self) -> str:
        inside = (
            f"{self.facts.documents} documents" if self.lengths_q is None else f"lengths {list(self.lengths_q[:8])}"
        )
        return f"Packed({inside})"


@lasting
def _device_boundaries(name: str, data: torch.Tensor) -> torch.Tensor:
    given = integer_tensor(name, data, 1, "[documents + 1]")
    if given.shape[0] == 0:
        raise ValueError(f"{name}: at least the leading 0 is needed, got an empty tensor")
    return normal(given.to(torch.int32).contiguous())  # kernels read neighbours
