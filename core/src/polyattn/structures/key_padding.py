"""KeyPadding: some keys of a row are padding that nobody may see."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch

from polyattn.door.request import StructureFacts
from polyattn.structures.base import Structure
from polyattn.structures.host_data import boundaries, integer_tensor, lengths_of, on_host, pairs_of

Queries = Literal["same", "all"]
Ranges = tuple[tuple[tuple[int, int], ...], ...]


class KeyPadding(Structure):
    """Key j of row b is visible iff it is kept.

    queries="same": q and k are the same tokens (Sq == Sk) and padded query rows return 0. "all": every query row is
    kept. Not stated, it is "same", and "all" in a layer of role "cross".

    >>> import torch, polyattn as pa
    >>> q = torch.randn(2, 4, 2, 8)
    >>> out = pa.attention(q, q, q, structure=pa.KeyPadding.from_lengths([4, 2], 4))
    >>> bool(out[1, 2:].eq(0).all())
    True
    """

    kind: ClassVar[str] = "key_padding"
    keep: torch.Tensor
    ranges: Ranges | None
    queries: Queries | None

    def __init__(self, keep: torch.Tensor, ranges: Ranges | None, queries: Queries | None, prefix: bool | None = None) -> None:
        if queries not in ("same", "all", None):
            raise ValueError(f"queries: 'same' or 'all' is accepted, got {queries!r}")
        if ranges is not None:
            prefix = all(len(row) == 0 or (len(row) == 1 and row[0][0] == 0) for row in ranges)
        kept = {row[0][1] if row else 0 for row in ranges} if ranges is not None and prefix else set()
        facts = StructureFacts(
            host=ranges is not None,
            documents=keep.shape[0],
            queries=queries,
            prefix=prefix,
            common_prefix=kept.pop() if len(kept) == 1 else None,
            mask_shape=(keep.shape[0], 1, 1, keep.shape[1]),
            mask_dtype="bool",
        )
        self._freeze(keep=keep, ranges=ranges, queries=queries, facts=facts)

    @classmethod
    def from_lengths(cls, lengths: Any, max_len: int, *, queries: Queries | None = None) -> KeyPadding:
        """Row b keeps its first `lengths[b]` of `max_len` keys. A device tensor [B] is trusted."""
        if not on_host(lengths):
            integer_tensor("lengths", lengths, 1)
            keep = torch.arange(max_len, device=lengths.device) < lengths[:, None]
            return cls(keep, None, queries, prefix=True)
        values = lengths_of("lengths", lengths)
        for row, length in enumerate(values):
            if length > max_len:
                raise ValueError(f"lengths: row {row} has {length} keys, more than max_len {max_len}")
        return cls(_keep_from(rows := _prefixes(values), max_len), rows, queries)

    @classmethod
    def from_mask(cls, mask: torch.Tensor, *, queries: Queries | None = None) -> KeyPadding:
        """From a bool or integer mask [B,Sk], nonzero = kept. A device mask is trusted and never read on the host."""
        if not isinstance(mask, torch.Tensor):
            raise TypeError(f"mask: a tensor [B, Sk] is needed, got {type(mask).__name__}")
        if mask.dim() != 2:
            raise ValueError(f"mask: shape [B, Sk] is needed, got {list(mask.shape)}; other masks are `Mask`'s")
        if mask.dtype.is_floating_point or mask.dtype.is_complex:
            raise TypeError(f"mask: bool or integer (nonzero = kept) is needed, got {mask.dtype}; additive ones are `Mask`'s")
        keep = mask.detach().clone() if mask.dtype == torch.bool else mask.detach() != 0
        return cls(keep, _ranges_of(keep) if on_host(keep) else None, queries)

    @classmethod
    def from_ranges(cls, ranges: Any, max_len: int, *, queries: Queries | None = None) -> KeyPadding:
        """Row b keeps the half-open `ranges[b]`, sorted and disjoint, within `max_len`."""
        rows = pairs_of("ranges", ranges)
        for row, pairs in enumerate(rows):
            if pairs and pairs[-1][1] > max_len:
                raise ValueError(f"ranges[{row}]: {pairs[-1]} ends past max_len {max_len}")
        merged = tuple(_merged(pairs) for pairs in rows)
        return cls(_keep_from(merged, max_len), merged, queries)

    def with_queries(self, queries: Queries) -> KeyPadding:
        """The same kept keys with the query rule stated; the same object where it already is."""
        if self.queries == queries:
            return self
        return self._twins[queries]

    @cached_property
    def _twins(self) -> dict[str, KeyPadding]:
        prefix = self.facts.prefix
        return {rule: KeyPadding(self.keep, self.ranges, rule, prefix) for rule in ("same", "all")}  # type: ignore[arg-type]

    def check(self, q_shape: tuple[int, ...], k_shape: tuple[int, ...]) -> None:
        batch, keys = self.keep.shape
        if k_shape[0] != batch or k_shape[1] != keys:
            raise ValueError(f"structure: KeyPadding is for k of [B={batch}, Sk={keys}], got k {list(k_shape)}")
        if self.queries != "all" and q_shape[1] != keys:
            raise ValueError(
                f"structure: KeyPadding(queries='same') needs as many queries as keys, got Sq={q_shape[1]} and Sk={keys}; "
                "queries='all' keeps every query row (cross attention)"
            )

    def prepare(self, device: torch.device, k_shape: tuple[int, ...]) -> KeyPaddingMeta:
        return KeyPaddingMeta(
            keep=self.keep.to(device),
            queries=self.queries or "same",
            ranges=self.ranges,
            prefix=self.facts.prefix,
            common_prefix=self.facts.common_prefix,
        )

    def anchors(self) -> tuple[torch.Tensor, ...]:
        return (self.keep,)

    def anchor_detail(self) -> str:
        return self.queries or ""

    @classmethod
    def from_anchors(cls, tensors: tuple[torch.Tensor, ...], ints: tuple[int, ...], detail: str) -> KeyPadding:
        return cls.from_mask(tensors[0], queries=detail or None)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"KeyPadding({self.keep.shape[0]} rows of {self.keep.shape[1]}, queries={self.queries!r})"


@dataclass(frozen=True)
class KeyPaddingMeta:
    """KeyPadding on one device.

    keep [B,Sk] bool; `ranges` and what derives from them exist only where the host knows the padding.
    """

    keep: torch.Tensor
    queries: Queries
    ranges: Ranges | None
    prefix: bool | None
    common_prefix: int | None

    @cached_property
    def lengths(self) -> tuple[int, ...] | None:
        """Kept keys of each row, when the host knows them."""
        return None if self.ranges is None else tuple(sum(end - start for start, end in row) for row in self.ranges)

    @cached_property
    def seqused(self) -> torch.Tensor:
        """Kept keys of each row [B] int32, on the device."""
        return self.keep.sum(dim=1, dtype=torch.int32)

    @cached_property
    def indices(self) -> torch.Tensor:
        """Flat positions b*Sk+j of the kept keys [nnz] int64, on the device; needs host ranges."""
        if self.ranges is None:
            raise ValueError("indices of kept keys need lengths, ranges or a mask given on the host")
        width = self.keep.shape[1]
        pieces = [
            torch.arange(row * width + start, row * width + end)
            for row, pairs in enumerate(self.ranges)
            for start, end in pairs
        ]
        flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
        return flat.to(self.keep.device)

    @cached_property
    def cu_seqlens(self) -> torch.Tensor:
        """int32 boundaries [B+1] of the rows once packed, on the device; needs host ranges."""
        return boundaries(self.lengths or ()).to(self.keep.device)


def _prefixes(lengths: tuple[int, ...]) -> Ranges:
    return tuple(((0, length),) if length else () for length in lengths)


def _merged(pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for start, end in pairs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


def _keep_from(ranges: Ranges, max_len: int) -> torch.Tensor:
    keep = torch.zeros(len(ranges), max_len, dtype=torch.bool)
    for row, pairs in enumerate(ranges):
        for start, end in pairs:
            keep[row, start:end] = True
    return keep


def _ranges_of(keep: torch.Tensor) -> Ranges:
    edge = torch.zeros(keep.shape[0], 1, dtype=torch.int8)
    steps = torch.diff(keep.to(torch.int8), prepend=edge, append=edge)
    rows: list[list[tuple[int, int]]] = [[] for _ in range(keep.shape[0])]
    starts, ends = (steps == 1).nonzero().tolist(), (steps == -1).nonzero().tolist()
    for (row, start), (_, end) in zip(starts, ends, strict=True):
        rows[row].append((start, end))
    return tuple(tuple(row) for row in rows)


